//! The endpoint that Prometheus scrapes: `GET /metrics` over HTTP/1.1, one answer per connection.
//!
//! Anybody who reaches the address may ask, so what a caller can make the daemon do is bounded: few connections
//! at a time, short requests within a short time, and one look at the state per `FRESH` however many ask.

use std::{
    io,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::{Mutex, Semaphore},
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

/// Answers scrapes at `address` with what `render` says. `render` may block; it runs on a thread of its own.
pub async fn serve(
    address: SocketAddr,
    render: impl Fn() -> String + Send + Sync + 'static,
) -> Result<MetricsServer, MetricsError> {
    let failed = |source| MetricsError { address, source };
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    let page = Arc::new(Page {
        render: Arc::new(render),
        last: Mutex::new(None),
    });
    Ok(MetricsServer {
        address,
        task: tokio::spawn(accept(listener, page)),
    })
}

async fn accept(listener: TcpListener, page: Arc<Page>) {
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
struct Page {
    render: Arc<dyn Fn() -> String + Send + Sync>,
    last: Mutex<Option<(Instant, Arc<str>)>>,
}

impl Page {
    async fn get(&self) -> io::Result<Arc<str>> {
        let mut last = self.last.lock().await;
        if let Some((at, text)) = &*last
            && at.elapsed() < FRESH
        {
            return Ok(Arc::clone(text));
        }
        let render = Arc::clone(&self.render);
        let text = tokio::task::spawn_blocking(move || render()).await?;
        let text: Arc<str> = text.into();
        *last = Some((Instant::now(), Arc::clone(&text)));
        Ok(text)
    }
}

async fn answer(mut stream: TcpStream, page: &Page) -> io::Result<()> {
    let head = read_head(&mut stream).await?;
    let request = head.as_deref().map_or(Request::TooLong, parse);
    let (status, body) = match request {
        Request::Metrics { .. } => ("200 OK", page.get().await?),
        Request::Root => ("200 OK", "gpuquotad; metrics are at /metrics\n".into()),
        Request::NotFound => ("404 Not Found", "metrics are at /metrics\n".into()),
        Request::BadMethod => ("405 Method Not Allowed", "use GET\n".into()),
        Request::Invalid => ("400 Bad Request", "no HTTP request\n".into()),
        Request::TooLong => (
            "431 Request Header Fields Too Large",
            "the request is too long\n".into(),
        ),
    };
    let kind = if matches!(request, Request::Metrics { .. }) {
        CONTENT_TYPE
    } else {
        "text/plain; charset=utf-8"
    };
    let allow = if matches!(request, Request::BadMethod) {
        "Allow: GET, HEAD\r\n"
    } else {
        ""
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n{allow}Connection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await?;
    if !matches!(request, Request::Metrics { body: false }) {
        stream.write_all(body.as_bytes()).await?;
    }
    stream.shutdown().await
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Request {
    Metrics { body: bool },
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
        Some("/metrics") => Request::Metrics { body },
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
        let server = serve(any_port(), move || {
            counted.fetch_add(1, Ordering::SeqCst);
            "gpuquota_x 1\n".into()
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
    async fn other_requests_are_turned_down() {
        let server = serve(any_port(), String::new).await.expect("serves");
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
        let server = serve(any_port(), String::new).await.expect("serves");
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
