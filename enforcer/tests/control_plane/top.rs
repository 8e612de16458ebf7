//! `gpuquotactl top` on a terminal, and its one frame for scripts.

use std::{
    io::{Read as _, Write as _},
    process::{Child, ChildStdin, Command, Stdio},
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use crate::support::{Daemon, stderr, stdout};

const PATIENCE: Duration = Duration::from_secs(10);

/// A shell on a terminal of 24 lines and 80 columns, through script(1).
struct Terminal {
    child: Child,
    keys: ChildStdin,
    shown: Arc<Mutex<String>>,
}

impl Terminal {
    fn run(daemon: &Daemon, arguments: &str) -> Self {
        // What is asked of the terminal afterwards shows whether it was left as it was found.
        let line = format!(
            "stty rows 24 cols 80; {} --bus {} top {arguments}; echo code=$?; stty -a; echo over",
            env!("CARGO_BIN_EXE_gpuquotactl"),
            daemon.bus
        );
        let mut child = Command::new("script")
            .args(["-qefc", &line, "/dev/null"])
            .env("TERM", "xterm-256color")
            .env("SHELL", "/bin/sh")
            .env_remove("NO_COLOR")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("script(1)");
        let shown = Arc::new(Mutex::new(String::new()));
        let mut output = child.stdout.take().expect("a pipe");
        let all = Arc::clone(&shown);
        thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(count @ 1..) = output.read(&mut buffer) {
                let text = String::from_utf8_lossy(&buffer[..count]).into_owned();
                all.lock().expect("lock").push_str(&text);
            }
        });
        Self {
            keys: child.stdin.take().expect("a pipe"),
            child,
            shown,
        }
    }

    /// Waits until `text` stands on the screen; gives the screen and all that was written.
    fn wait(&mut self, text: &str) -> (String, String) {
        let end = Instant::now() + PATIENCE;
        loop {
            let written = self.shown.lock().expect("lock").clone();
            let screen = screen(&written);
            if screen.contains(text) {
                return (screen, written);
            }
            assert!(Instant::now() < end, "no {text:?} on the screen:\n{screen}");
            thread::sleep(Duration::from_millis(10));
        }
    }

    fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).expect("written");
        self.keys.flush().expect("flushed");
    }

    fn left_clean(mut self) {
        let (_, written) = self.wait("over");
        let after = &written[written.rfind("\u{1b}[?1049h").expect("was started")..];
        // Main screen, visible cursor, and a terminal that edits lines and echoes again.
        assert!(after.contains("\u{1b}[?1049l"), "{after:?}");
        assert!(after.contains("\u{1b}[?25h"), "{after:?}");
        assert!(after.contains("code=0"), "{after:?}");
        let words: Vec<&str> = after.split_whitespace().collect();
        for word in ["icanon", "echo", "isig", "opost"] {
            assert!(
                words.iter().any(|seen| seen.trim_end_matches(';') == word),
                "{word}: {after:?}"
            );
        }
        assert!(self.child.wait().expect("waited for").success());
    }
}

/// What a terminal of 24 lines and 80 columns shows after this was written to it, as far as `top` uses one.
fn screen(written: &str) -> String {
    let mut cells = vec![vec![' '; 80]; 24];
    let (mut row, mut column) = (0_usize, 0_usize);
    let mut text = written.chars();
    while let Some(c) = text.next() {
        match c {
            '\u{1b}' => {
                if text.next() != Some('[') {
                    continue;
                }
                let mut parameters = String::new();
                let end = text.by_ref().find(|c| {
                    parameters.push(*c);
                    c.is_ascii_alphabetic()
                });
                parameters.pop();
                let mut numbers = parameters
                    .split(';')
                    .map(|number| number.parse().unwrap_or(1));
                match end {
                    Some('H') => {
                        row = numbers.next().unwrap_or(1) - 1;
                        column = numbers.next().unwrap_or(1) - 1;
                    }
                    Some('J') => cells = vec![vec![' '; 80]; 24],
                    // The other screen.
                    Some('h' | 'l') if parameters == "?1049" => {
                        cells = vec![vec![' '; 80]; 24];
                        (row, column) = (0, 0);
                    }
                    _ => {}
                }
            }
            '\r' => column = 0,
            '\n' => row += 1,
            c => {
                if let Some(cell) = cells.get_mut(row).and_then(|line| line.get_mut(column)) {
                    *cell = c;
                }
                column += 1;
            }
        }
    }
    let lines = cells.iter().map(|line| line.iter().collect::<String>());
    lines.collect::<Vec<_>>().join("\n")
}

#[test]
fn it_starts_reacts_to_keys_and_leaves_the_terminal_clean() {
    let daemon = Daemon::on_peer();
    let mut terminal = Terminal::run(&daemon, "--interval 0.2");
    let (first, written) = terminal.wait("q quit");
    assert!(written.contains("\u{1b}[?1049h"), "{written:?}");
    assert!(
        first.contains("vision") && first.contains("12.5G"),
        "{first}"
    );
    terminal.press("?");
    terminal.wait("any key goes back");
    terminal.press("?");
    terminal.wait("Enter processes");
    // Down to the nested tenant, and into it.
    terminal.press("\u{1b}[B\r");
    let (_, written) = terminal.wait("python3");
    // A process that calls itself a control sequence is shown harmlessly.
    assert!(
        written.contains("evil\u{fffd}") && !written.contains("evil\u{1b}"),
        "{written:?}"
    );
    terminal.press("\u{1b}");
    terminal.wait("Enter processes");
    // New numbers appear by themselves.
    for tenant in daemon.control.tenants.lock().expect("lock").iter_mut() {
        tenant.gpus[0].memory_used = 7 << 30;
    }
    terminal.wait("7G");
    terminal.press("q");
    terminal.left_clean();
}

#[test]
fn ctrl_c_and_the_end_of_the_daemon_leave_it_clean_too() {
    let mut daemon = Daemon::on_peer();
    let mut terminal = Terminal::run(&daemon, "--interval 0.1");
    terminal.wait("q quit");
    daemon.stop();
    terminal.wait("no news from the daemon");
    terminal.press("\u{3}");
    terminal.left_clean();
}

#[test]
fn one_frame_goes_to_scripts() {
    let daemon = Daemon::on_peer();
    let text = stdout(&daemon.ctl(&["top", "--once", "--sort", "name"]));
    assert!(!text.contains('\u{1b}'), "{text}");
    assert!(
        text.lines().all(|line| line.chars().count() <= 80),
        "{text}"
    );
    assert!(
        text.contains("  vision ") && text.contains("  lab "),
        "{text}"
    );
    let wide = stdout(&daemon.ctl(&["top", "--once", "--width", "120"]));
    assert!(
        wide.contains("CLASS") && wide.contains("guaranteed"),
        "{wide}"
    );
    let some = stdout(&daemon.ctl(&["top", "--once", "--filter", "no such"]));
    assert!(some.contains("No tenant matches"), "{some}");
}

#[test]
fn without_a_terminal_it_says_what_to_do() {
    let daemon = Daemon::on_peer();
    let refused = daemon.ctl(&["top"]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(stderr(&refused).contains("--once"), "{}", stderr(&refused));
}
