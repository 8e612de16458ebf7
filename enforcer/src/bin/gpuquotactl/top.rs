//! `top`: tenants and what they use, live.
//!
//! [`model`] is the state and what keys do to it, [`view`] draws it; both are pure. Here is the terminal: keys,
//! the clock, the daemon, and the promise that the terminal is left as it was.

mod heat;
mod model;
mod view;

use std::{
    io::{self, IsTerminal as _},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use gpuquota_enforcer::{client::Client, config::Bus};
use ratatui::{
    DefaultTerminal,
    buffer::Buffer,
    crossterm::{
        event::{self, Event, KeyEventKind},
        terminal,
    },
    layout::Rect,
};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::mpsc,
    time::{MissedTickBehavior, interval},
};

pub use self::model::Sort;
use self::model::{Data, Flow, Model, Page};
use crate::{
    args::TopArgs,
    error::Error,
    output::{Screen, print},
};

/// Events that may wait to be looked at.
const WAITING: usize = 64;
/// Width of a frame that goes to a file.
const WIDTH: u16 = 80;

/// `top`
pub async fn top(bus: &Bus, arguments: &TopArgs) -> Result<(), Error> {
    let client = Client::connect(bus).await?;
    let mut model = Model::new(arguments.sort, arguments.filter.clone().unwrap_or_default());
    model.show(read(&client, false).await?);
    if arguments.once {
        return print(&frame(&mut model, arguments.width, Screen::stdout()));
    }
    if !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        return Err(Error::NoTerminal);
    }
    // From here to `restore` nothing returns early. A panic restores the terminal as well.
    let mut terminal = ratatui::try_init().map_err(Error::Output)?;
    let end = live(&mut terminal, bus, client, &mut model, arguments.interval).await;
    ratatui::restore();
    end
}

/// Asks the daemon, about the time before now too if `heat` says so.
async fn read(client: &Client, heat: bool) -> Result<Data, Error> {
    let heat = if heat {
        client.memory_heat_map(heat::SINCE, heat::COLUMNS).await?
    } else {
        Vec::new()
    };
    Ok(Data {
        gpus: client.gpus().await?,
        tenants: client.tenants().await?,
        heat,
        at: Instant::now(),
    })
}

/// One frame as text, as high as it has to be.
fn frame(model: &mut Model, width: Option<u16>, screen: Screen) -> String {
    let columns = || terminal::size().ok().map(|(width, _)| width);
    let width = width
        .or_else(|| io::stdout().is_terminal().then(columns).flatten())
        .unwrap_or(WIDTH)
        .max(view::MIN_WIDTH);
    let area = Rect::new(0, 0, width, view::height_of_all(model));
    let mut buffer = Buffer::empty(area);
    view::draw(
        model,
        view::Look {
            screen,
            live: false,
        },
        area,
        &mut buffer,
    );
    text(&buffer)
}

fn text(buffer: &Buffer) -> String {
    let mut text = String::new();
    for y in buffer.area.rows() {
        let line: String = y
            .columns()
            .map(|cell| buffer[(cell.x, cell.y)].symbol().to_owned())
            .collect();
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text.truncate(text.trim_end().len());
    text.push('\n');
    text
}

async fn live(
    terminal: &mut DefaultTerminal,
    bus: &Bus,
    client: Client,
    model: &mut Model,
    every: Duration,
) -> Result<(), Error> {
    let mut events = keys();
    let wants_heat = Arc::new(AtomicBool::new(false));
    let mut answers = watch(bus.clone(), client, every, Arc::clone(&wants_heat));
    let mut terminate = signal(SignalKind::terminate()).map_err(Error::Start)?;
    let mut hangup = signal(SignalKind::hangup()).map_err(Error::Start)?;
    let look = view::Look {
        screen: Screen::stdout(),
        live: true,
    };
    loop {
        terminal
            .draw(|frame| view::draw(model, look, frame.area(), frame.buffer_mut()))
            .map_err(Error::Output)?;
        tokio::select! {
            event = events.recv() => match event {
                Some(Ok(Event::Key(key))) if key.kind != KeyEventKind::Release => {
                    if model.key(key) == Flow::Quit {
                        return Ok(());
                    }
                    wants_heat.store(*model.page() == Page::Heat, Ordering::Relaxed);
                }
                // A change of size is drawn, whatever else there is means nothing here.
                Some(Ok(_)) => {}
                // The terminal is gone.
                Some(Err(_)) | None => return Ok(()),
            },
            answer = answers.recv() => match answer {
                Some(Ok(data)) => model.show(data),
                Some(Err(problem)) => model.trouble(problem),
                None => return Ok(()),
            },
            _ = terminate.recv() => return Ok(()),
            _ = hangup.recv() => return Ok(()),
        }
    }
}

/// Keys, read on a thread: reading blocks, and nothing may wait for a key.
fn keys() -> mpsc::Receiver<io::Result<Event>> {
    let (sender, receiver) = mpsc::channel(WAITING);
    thread::spawn(move || {
        loop {
            let event = event::read();
            let last = event.is_err();
            if sender.blocking_send(event).is_err() || last {
                return;
            }
        }
    });
    receiver
}

/// The daemon's answers. One that is away is looked for until it is back.
fn watch(
    bus: Bus,
    client: Client,
    every: Duration,
    wants_heat: Arc<AtomicBool>,
) -> mpsc::Receiver<Result<Data, String>> {
    let (sender, receiver) = mpsc::channel(1);
    tokio::spawn(async move {
        let mut client = Some(client);
        let mut clock = interval(every);
        clock.set_missed_tick_behavior(MissedTickBehavior::Delay);
        clock.tick().await;
        loop {
            clock.tick().await;
            let answer = ask(&bus, &mut client, wants_heat.load(Ordering::Relaxed))
                .await
                .map_err(|error| error.to_string());
            if answer.is_err() {
                client = None;
            }
            if sender.send(answer).await.is_err() {
                return;
            }
        }
    });
    receiver
}

async fn ask(bus: &Bus, client: &mut Option<Client>, heat: bool) -> Result<Data, Error> {
    let client = match client {
        Some(client) => client.clone(),
        None => client.insert(Client::connect(bus).await?).clone(),
    };
    read(&client, heat).await
}
