//! The endpoint that Prometheus scrapes: `GET /metrics` over HTTP/1.1, one answer per connection.
//!
//! Anybody who reaches the address may ask, so what a caller can make the daemon do is bounded: few connections
//! at a time, short requests within a short time, and one look at the state per `FRESH` however many ask. The text of a large
//! policy is megabytes: it is written in pieces, as fast as the caller takes them, and never there as a whole.

use std::{
    io,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::{Mutex, Semaphore, mpsc},
    task::JoinHandle,
};
use tracing::{debug, warn};

/// Connections that are served at the same time; more are hung up on.
const CONNECTIONS: usize = 32;
/// Longest request head in bytes.
const MAX_HEAD: usize = 8 << 10;
/// Longest time from the connection to the end of the answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// Scrapes within this time get the same answer.
const FRESH: Duration = Duration::from_millis(200);
/// Pause after an error of `accept`, such as too many open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The endpoint cannot be offered.
#[derive(Debug, thiserror::Error)]
#[error("metrics.address {address}: {source}")]
pub struct MetricsError {
    /// Where.
    address: SocketAddr,
    /// Why.
    source: io::Error,
}

/// The endpoint; it ends when this is dropped.
#[derive(Debug)]
pub struct MetricsServer {
    address: SocketAddr,
    task: JoinHandle<()>,
}

impl MetricsServer {
    /// Where it listens: with the port that the kernel chose if port 0 was asked for.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for MetricsServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Writes what was seen, in pieces, until one is not taken any more.
pub type Render<T> = fn(&T, &mut dyn FnMut(String) -> bool);

/// Answers scrapes at `address` with what `look` sees, as `render` writes it. Both may block; they run on threads of their own.
pub async fn serve<T: Send + Sync + 'static>(
    address: SocketAddr,
    look: impl Fn() -> T + Send + Sync + 'static,
    render: Render<T>,
) -> Result<MetricsServer, MetricsError> {
    let failed = |source| MetricsError { address, source };
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    let page = Arc::new(Page {
        look: Arc::new(look),
        render,
        last: Mutex::new(None),
    });
    Ok(MetricsServer {
        address,
        task: tokio::spawn(accept(listener, page)),
    })
}

async fn accept<T: Send + Sync + 'static>(listener: TcpListener, page: Arc<Page<T>>) {
    let slots = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                warn!(%error, "a scrape could not be accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let Ok(slot) = Arc::clone(&slots).try_acquire_owned() else {
            debug!("too many scrapes at the same time");
            continue;
        };
        let page = Arc::clone(&page);
        tokio::spawn(async move {
            let _slot = slot;
            match tokio::time::timeout(PATIENCE, answer(stream, &page)).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => debug!(%error, "a scrape was not answered"),
                Err(_) => debug!("a scraper was too slow"),
            }
        });
    }
}

/// What is shown, not older than [`FRESH`].
struct Page<T> {
    look: Arc<dyn Fn() -> T + Send + Sync>,
    render: Render<T>,
    last: Mutex<Option<(Instant, Arc<T>)>>,
}

impl<T: Send + Sync + 'static> Page<T> {
    async fn get(self: &Arc<Self>) -> io::Result<Arc<T>> {
        let mut last = self.last.lock().await;
        if let Some((at, seen)) = &*last
            && at.elapsed() < FRESH
        {
            return Ok(Arc::clone(seen));
        }
        let look = Arc::clone(&self.look);
        let seen = Arc::new(tokio::task::spawn_blocking(move || look()).await?);
        *last = Some((Instant::now(), Arc::clone(&seen)));
        let page = Arc::clone(self);
        tokio::spawn(async move {
            tokio::time::sleep(FRESH).await;
            page.forget().await;
        });
        Ok(seen)
    }

    /// Lets go of what nobody is shown any more.
    async fn forget(&self) {
        let mut last = self.last.lock().await;
        if last.as_ref().is_some_and(|(at, _)| at.elapsed() >= FRESH) {
            *last = None;
        }
    }

    /// The text in pieces, written no faster than they are taken.
    async fn text(self: &Arc<Self>) -> io::Result<mpsc::Receiver<String>> {
        let seen = self.get().await?;
        let render = self.render;
        let (sender, pieces) = mpsc::channel(1);
        tokio::task::spawn_blocking(move || {
            render(&seen, &mut |piece| sender.blocking_send(piece).is_ok());
        });
        Ok(pieces)
    }
}

async fn answer<T: Send + Sync + 'static>(
    mut stream: TcpStream,
    page: &Arc<Page<T>>,
) -> io::Result<()> {
    let head = read_head(&mut stream).await?;
    let request = head.as_deref().map_or(Request::TooLong, parse);
    let (status, body) = match request {
        Request::Metrics(wanted) => {
            answer_metrics(&mut stream, page, wanted).await?;
            return stream.shutdown().await;
        }
        Request::Root => ("200 OK", "gpuquotad; metrics are at /metrics\n"),
        Request::NotFound => ("404 Not Found", "metrics are at /metrics\n"),
        Request::BadMethod => ("405 Method Not Allowed", "use GET\n"),
        Request::Invalid => ("400 Bad Request", "no HTTP request\n"),
        Request::TooLong => (
            "431 Request Header Fields Too Large",
            "the request is too long\n",
        ),
    };
    let allow = if matches!(request, Request::BadMethod) {
        "Allow: GET, HEAD\r\n"
    } else {
        ""
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {}\r\n{allow}Connection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(body.as_bytes()).await?;
    stream.shutdown().await
}

/// A text of one piece is sent with its length. One of more is sent in chunks, so that its end can be told from a broken
/// connection; a caller of HTTP/1.0, which has no chunks, has to take the end of the connection for it.
async fn answer_metrics<T: Send + Sync + 'static>(
    stream: &mut TcpStream,
    page: &Arc<Page<T>>,
    wanted: Wanted,
) -> io::Result<()> {
    let head = |length: &str| {
        format!(
            "HTTP/1.1 200 OK\r\nContent-Type: {CONTENT_TYPE}\r\n{length}Connection: close\r\n\r\n"
        )
    };
    if !wanted.body {
        return stream.write_all(head("").as_bytes()).await;
    }
    let mut pieces = page.text().await?;
    let first = pieces.recv().await.unwrap_or_default();
    let Some(second) = pieces.recv().await else {
        let length = format!("Content-Length: {}\r\n", first.len());
        stream.write_all(head(&length).as_bytes()).await?;
        return stream.write_all(first.as_bytes()).await;
    };
    let length = if wanted.chunks {
        "Transfer-Encoding: chunked\r\n"
    } else {
        ""
    };
    stream.write_all(head(length).as_bytes()).await?;
    let mut next = Some(second);
    let mut piece = first;
    loop {
        if wanted.chunks {
            let size = format!("{:x}\r\n", piece.len());
            stream.write_all(size.as_bytes()).await?;
            piece.push_str("\r\n");
        }
        stream.write_all(piece.as_bytes()).await?;
        let Some(following) = next else { break };
        piece = following;
        next = pieces.recv().await;
    }
    if wanted.chunks {
        stream.write_all(b"0\r\n\r\n").await?;
    }
    Ok(())
}

/// The head of a request; `None` if it is too long.
async fn read_head(stream: &mut TcpStream) -> io::Result<Option<String>> {
    let mut head = Vec::new();
    let mut buffer = [0; 1024];
    loop {
        let count = stream.read(&mut buffer).await?;
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        // The end may lie across two reads.
        let from = head.len().saturating_sub(3);
        head.extend_from_slice(&buffer[..count]);
        if head[from..].windows(4).any(|end| end == b"\r\n\r\n") {
            return Ok(Some(String::from_utf8_lossy(&head).into_owned()));
        }
        if head.len() > MAX_HEAD {
            return Ok(None);
        }
    }
}

/// How somebody wants the metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Wanted {
    /// Whether the text, not only the head.
    body: bool,
    /// Whether the caller knows chunks (HTTP/1.1).
    chunks: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Request {
    Metrics(Wanted),
    Root,
    NotFound,
    BadMethod,
    Invalid,
    TooLong,
}

fn parse(head: &str) -> Request {
    let line = head.lines().next().unwrap_or_default();
    let words: Vec<&str> = line.split(' ').collect();
    let [method, target, version] = words.as_slice() else {
        return Request::Invalid;
    };
    if !version.starts_with("HTTP/1.") {
        return Request::Invalid;
    }
    let body = *method == "GET";
    if !body && *method != "HEAD" {
        return Request::BadMethod;
    }
    match target.split('?').next() {
        Some("/metrics") => Request::Metrics(Wanted {
            body,
            chunks: *version != "HTTP/1.0",
        }),
        Some("/") => Request::Root,
        _ => Request::NotFound,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    async fn ask(address: SocketAddr, request: &[u8]) -> String {
        let mut stream = TcpStream::connect(address).await.expect("connects");
        // The server may hang up on a request that it does not want to the end.
        let _ = stream.write_all(request).await;
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer).await;
        String::from_utf8(answer).expect("text")
    }

    fn any_port() -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], 0))
    }

    #[tokio::test]
    async fn one_look_at_the_state_serves_many_scrapes() {
        let looks = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&looks);
        let look = move || {
            counted.fetch_add(1, Ordering::SeqCst);
        };
        let server = serve(any_port(), look, |(), sink| {
            sink("gpuquota_x 1\n".into());
        })
        .await
        .expect("serves");
        for _ in 0..8 {
            let answer = ask(
                server.address(),
                b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
            )
            .await;
            assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
            assert!(answer.contains("Content-Length: 13\r\n"), "{answer}");
            assert!(answer.ends_with("\r\n\r\ngpuquota_x 1\n"), "{answer}");
        }
        assert!(looks.load(Ordering::SeqCst) < 8);
        tokio::time::sleep(FRESH).await;
        let before = looks.load(Ordering::SeqCst);
        ask(server.address(), b"GET /metrics HTTP/1.1\r\n\r\n").await;
        assert_eq!(looks.load(Ordering::SeqCst), before + 1);
    }

    #[tokio::test]
    async fn a_long_text_is_sent_in_chunks_to_who_knows_them() {
        let server = serve(
            any_port(),
            || 3_u32,
            |count, sink| {
                for number in 0..*count {
                    assert!(sink(format!("gpuquota_x{number} 1\n")));
                }
            },
        )
        .await
        .expect("serves");
        let new = ask(server.address(), b"GET /metrics HTTP/1.1\r\n\r\n").await;
        let (head, body) = new.split_once("\r\n\r\n").expect("a head");
        assert!(head.contains("Transfer-Encoding: chunked"), "{head}");
        assert!(!head.contains("Content-Length"), "{head}");
        assert_eq!(
            body,
            "e\r\ngpuquota_x0 1\n\r\ne\r\ngpuquota_x1 1\n\r\ne\r\ngpuquota_x2 1\n\r\n0\r\n\r\n"
        );
        let old = ask(server.address(), b"GET /metrics HTTP/1.0\r\n\r\n").await;
        let (head, body) = old.split_once("\r\n\r\n").expect("a head");
        assert!(!head.contains("chunked"), "{head}");
        assert_eq!(body, "gpuquota_x0 1\ngpuquota_x1 1\ngpuquota_x2 1\n");
    }

    #[tokio::test]
    async fn what_was_seen_is_let_go_of() {
        let kept = Arc::new(());
        let seen = Arc::clone(&kept);
        let server = serve(any_port(), move || Arc::clone(&seen), |_, _| {})
            .await
            .expect("serves");
        ask(server.address(), b"GET /metrics HTTP/1.1\r\n\r\n").await;
        // One here, one in the closure.
        while Arc::strong_count(&kept) > 2 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    #[tokio::test]
    async fn other_requests_are_turned_down() {
        let server = serve(any_port(), || (), |(), _| {}).await.expect("serves");
        for (request, status) in [
            ("GET / HTTP/1.1\r\n\r\n", "200"),
            ("HEAD /metrics HTTP/1.0\r\n\r\n", "200"),
            ("GET /metrics?x=1 HTTP/1.1\r\n\r\n", "200"),
            ("GET /etc/passwd HTTP/1.1\r\n\r\n", "404"),
            ("POST /metrics HTTP/1.1\r\n\r\n", "405"),
            ("nonsense\r\n\r\n", "400"),
            ("GET /metrics SPDY/9\r\n\r\n", "400"),
        ] {
            let answer = ask(server.address(), request.as_bytes()).await;
            assert_eq!(
                answer.split(' ').nth(1),
                Some(status),
                "{request:?}: {answer}"
            );
        }
        let long = format!("GET /{} HTTP/1.1\r\n", "x".repeat(2 * MAX_HEAD));
        let answer = ask(server.address(), long.as_bytes()).await;
        // A reset may overtake the answer.
        assert!(answer.is_empty() || answer.contains(" 431 "), "{answer}");
    }

    #[tokio::test]
    async fn callers_that_say_nothing_do_not_keep_others_out_for_long() {
        let server = serve(any_port(), || (), |(), _| {}).await.expect("serves");
        let mut silent = Vec::new();
        for _ in 0..CONNECTIONS {
            silent.push(
                TcpStream::connect(server.address())
                    .await
                    .expect("connects"),
            );
        }
        // All slots are taken sooner or later, and then the next caller is hung up on.
        let request = b"GET /metrics HTTP/1.1\r\n\r\n";
        while !ask(server.address(), request).await.is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        drop(silent);
        while ask(server.address(), request).await.is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}
