//! `idle`: what threads do while a GPU is idle.

use std::{fmt::Write as _, time::Duration};

use gpuquota_enforcer::{
    client::{Client, looks::Idle},
    control::idle::{IdleGpu, IdleProcess, IdleReport, IdleShare, IdleStack, IdleState},
    idle::{State, folded::folded},
};

use crate::{
    args::IdleArgs,
    error::Error,
    look::{self, Remarks},
    output::{self, Align, Screen, Style, Table, clean},
};

/// Stacks that are shown.
const SHOWN: usize = 8;
/// Frames of a stack that are shown.
const FRAMES: usize = 16;
/// Processes that are shown for a GPU.
const PROCESSES: usize = 16;

/// Looks for so long, or until interrupted, and shows what was found; without a target, what looks there are.
pub async fn idle(client: &Client, arguments: &IdleArgs) -> Result<(), Error> {
    let words = look::Words {
        doing: "following the threads",
        none: "no threads are followed; `gpuquotactl idle TENANT` or PID begins to\n",
    };
    let looked = look::look::<Idle>(client, &arguments.look, arguments.json, &words);
    let Some(report) = looked.await? else {
        return Ok(());
    };
    if let Some(file) = &arguments.folded {
        std::fs::write(file, folded(&report)).map_err(|source| Error::File {
            path: file.clone(),
            source,
        })?;
    }
    if arguments.json {
        output::print_json(&report)
    } else {
        output::print(&text(&report, Screen::stdout()))
    }
}

fn text(report: &IdleReport, screen: Screen) -> String {
    let mut text = format!(
        "{}: {} followed for {:.1} s\n",
        clean(&report.target.to_string()),
        processes(report.processes.len()),
        Duration::from_micros(report.elapsed_usec).as_secs_f64(),
    );
    text += &cost(&report.processes);
    text += &remarks(report, screen);
    if report.gpus.is_empty() {
        text += "none of them has a context on a GPU\n";
    }
    for gpu in &report.gpus {
        text += &table(report, gpu, screen);
    }
    for (at, stack) in report
        .stacks
        .iter()
        .filter(|stack| stack.idle_usec > 0)
        .take(SHOWN)
        .enumerate()
    {
        text += &shown(at + 1, stack, screen);
    }
    text
}

/// What it has cost to follow them, where most, and what was not seen for that.
fn cost(processes: &[IdleProcess]) -> String {
    let Some(most) = processes.iter().max_by(|a, b| a.cost.total_cmp(&b.cost)) else {
        return String::new();
    };
    let covered = processes
        .iter()
        .map(|process| process.covered)
        .fold(1.0, f64::min);
    if covered >= 0.995 {
        return String::new();
    }
    format!(
        "following cost {:.2}% of a process's time at most ({:.2}% may be), and was on for {:.0}% of the time: what is told is of that\n",
        100.0 * most.cost,
        100.0 * most.budget,
        100.0 * covered,
    )
}

fn processes(number: usize) -> String {
    match number {
        1 => "1 process".to_owned(),
        number => format!("{number} processes"),
    }
}

/// What a GPU was used for, and what processes did while it was not.
fn table(report: &IdleReport, gpu: &IdleGpu, screen: Screen) -> String {
    let mut text = format!("\nGPU {}", gpu.gpu);
    if let Some(step) = gpu.step_usec {
        let _ = write!(
            text,
            ", its use known in steps of {} ms",
            (step + 500) / 1000
        );
    }
    text += "\n";
    if let Some(trouble) = &gpu.trouble {
        let line = format!("GPU {}: {}", gpu.gpu, clean(trouble));
        let _ = writeln!(text, "{}", screen.paint(Style::Warn, &line));
    }
    if gpu.untold_usec > 0 {
        let seconds = Duration::from_micros(gpu.untold_usec).as_secs_f64();
        let line =
            format!("{seconds:.1} s are left out: the board was at work, and NVML told of nobody");
        let _ = writeln!(text, "{}", screen.paint(Style::Warn, &line));
    }
    let shares: Vec<&IdleShare> = gpu.shares.iter().take(PROCESSES).collect();
    if shares.is_empty() {
        text += "nothing is known of its use yet\n";
        return text;
    }
    let states: Vec<State> = State::ALL
        .into_iter()
        .filter(|state| {
            let some = |share: &&IdleShare| share.states[state.index()].idle_usec > 0;
            shares.iter().any(some)
        })
        .collect();
    let mut columns = vec![
        ("PID", Align::Right),
        ("PROGRAM", Align::Left),
        ("USED", Align::Right),
        ("OTHERS", Align::Right),
        ("IDLE", Align::Right),
    ];
    columns.extend(states.iter().map(|state| (heading(*state), Align::Right)));
    let mut rows = Table::new(&columns);
    for share in &shares {
        let comm = report
            .processes
            .iter()
            .find(|process| process.pid == share.pid)
            .map_or("?", |process| process.comm.as_str());
        let comm = if share.context {
            clean(comm)
        } else {
            format!("{} (no context)", clean(comm))
        };
        let of_all = |usec| percent(usec, share.known_usec);
        let mut row = vec![
            (share.pid.to_string(), Style::Plain),
            (comm, Style::Plain),
            (of_all(share.used_usec), Style::Plain),
            (of_all(share.others_usec), Style::Plain),
            (of_all(share.idle_usec), Style::Bold),
        ];
        row.extend(states.iter().filter_map(|state| {
            let found = share.states.get(state.index())?;
            Some((cell(found, share.idle_usec), Style::Plain))
        }));
        rows.row(row);
    }
    text += &rows.render(screen);
    if let Some(more) = gpu
        .shares
        .len()
        .checked_sub(PROCESSES)
        .filter(|more| *more > 0)
    {
        let _ = writeln!(text, "{} more; --json shows all", processes(more));
    }
    text
}

fn heading(state: State) -> &'static str {
    match state {
        State::Running => "RUNNING",
        State::Queued => "QUEUED",
        State::Io => "I/O",
        State::Driver => "DRIVER",
        State::Lock => "LOCK",
        State::Asleep => "ASLEEP",
        State::Held => "HELD",
        State::Halted => "HALTED",
    }
}

/// The share of the idle time, and the bounds of it where they are apart.
fn cell(state: &IdleState, idle: u64) -> String {
    let estimate = percent(state.idle_usec, idle);
    let (least, most) = (
        whole_percent(state.least_usec, idle),
        whole_percent(state.most_usec, idle),
    );
    if most > least {
        format!("{estimate} {least}-{most}")
    } else {
        estimate
    }
}

fn whole_percent(part: u64, whole: u64) -> u64 {
    (part * 100 + whole / 2).checked_div(whole).unwrap_or(0)
}

fn percent(part: u64, whole: u64) -> String {
    if whole == 0 {
        return "-".to_owned();
    }
    format!("{}%", whole_percent(part, whole))
}

fn shown(at: usize, stack: &IdleStack, screen: Screen) -> String {
    let head = format!(
        "#{at} {:.2} s of thread time while idle, {}, in {} of process {}",
        Duration::from_micros(stack.idle_usec).as_secs_f64(),
        stack.state.name(),
        clean(&stack.thread),
        stack.pid
    );
    let mut text = format!("\n{}\n", screen.paint(Style::Bold, &head));
    text += &look::frames(&stack.frames, stack.cut, FRAMES, screen);
    text
}

/// What is not known for certain.
fn remarks(report: &IdleReport, screen: Screen) -> String {
    let gaps = &report.gaps;
    let mut remarks = Remarks::default();
    remarks.count(
        gaps.lost,
        "changes of threads were lost: states are right again after, not meanwhile",
    );
    remarks.count(gaps.stackless, "stacks were lost");
    remarks.count(
        gaps.crowded,
        "changes of threads are not followed: there are too many threads",
    );
    remarks.count(
        gaps.processes,
        "processes are not followed: there are too many, or their number was used before",
    );
    remarks.count(
        gaps.uncounted_usec / 1_000_000,
        "s of thread time are on no stack: the use of the GPU was not told, or there are too many stacks",
    );
    if let Some(why) = &gaps.no_samples {
        remarks.say(format!("no stacks of running threads: {}", clean(why)));
    }
    remarks.stacks(&gaps.unnamed, &gaps.too_large);
    remarks.shown(screen)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_shows_its_bounds_where_they_are_apart() {
        let state = |idle_usec, least_usec, most_usec| IdleState {
            state: State::Io,
            time_usec: 100,
            idle_usec,
            least_usec,
            most_usec,
        };
        assert_eq!(cell(&state(48, 40, 60), 60), "80% 67-100");
        assert_eq!(cell(&state(60, 60, 60), 60), "100%");
        assert_eq!(cell(&state(0, 0, 0), 0), "-");
    }
}
