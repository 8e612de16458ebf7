//! Stacks while GPUs were idle as folded stacks: a line for each, outermost first, with microseconds. Flame graph programs
//! read that.

use crate::control::idle::IdleReport;

/// The stacks as text: program and process, thread, the functions, and what the thread did.
pub fn folded(report: &IdleReport) -> String {
    let mut lines: Vec<String> = report
        .stacks
        .iter()
        .filter(|stack| stack.idle_usec > 0)
        .map(|stack| {
            let comm = report
                .processes
                .iter()
                .find(|process| process.pid == stack.pid)
                .map_or("?", |process| process.comm.as_str());
            let mut names = vec![format!("{comm}-{}", stack.pid), stack.thread.clone()];
            if stack.cut {
                names.push("[cut]".to_owned());
            }
            names.extend(stack.frames.iter().rev().map(ToString::to_string));
            names.push(format!("[{}]", stack.state.name()));
            let names: Vec<String> = names
                .iter()
                // Semicolons and line ends would mean something else.
                .map(|name| name.replace(';', ":").replace(['\n', '\r'], " "))
                .collect();
            format!("{} {}", names.join(";"), stack.idle_usec)
        })
        .collect();
    lines.sort_unstable();
    // Every line ends, and no line is no text.
    lines.push(String::new());
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        control::{
            idle::{IdleGaps, IdleProcess, IdleStack},
            leaks::{LeakFrame, Target},
        },
        idle::State,
    };

    #[test]
    fn a_line_for_each_stack() {
        let frame = |function: &str| LeakFrame {
            function: Some(function.to_owned()),
            file: String::new(),
            address: 1,
        };
        let stack = |thread: &str, cut, idle_usec| IdleStack {
            pid: 7,
            thread: thread.to_owned(),
            state: State::Lock,
            frames: vec![frame("wait"), frame("a;b")],
            cut,
            idle_usec,
        };
        let report = IdleReport {
            target: Target::Process(7),
            running: false,
            elapsed_usec: 1,
            limit_usec: 1,
            gpus: Vec::new(),
            processes: vec![IdleProcess {
                pid: 7,
                comm: "train".to_owned(),
                ended: false,
                cost: 0.0,
                budget: 0.01,
                covered: 1.0,
            }],
            stacks: vec![
                stack("main", false, 5),
                stack("io\n", true, 3),
                stack("x", false, 0),
            ],
            gaps: IdleGaps::default(),
        };
        assert_eq!(
            folded(&report),
            "train-7;io ;[cut];a:b;wait;[lock] 3\ntrain-7;main;a:b;wait;[lock] 5\n"
        );
    }
}
