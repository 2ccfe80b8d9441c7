//! [`SocketTransport`]: connects processes of one host by Unix sockets.

use std::fmt;
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::mem::MaybeUninit;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;

use burn_dtensor::comm::transport::{Message, MessageHandler, RecvBuffer, SendStamp, Transport};

/// The connections of one process. Each has a thread that sends and one that receives.
///
/// A message is the lengths of its header and payloads, their number first, and then the bytes of
/// all of them.
pub struct SocketTransport {
    here: usize,
    /// One for each process, `None` for this one.
    connections: Vec<Option<Connection>>,
}

struct Connection {
    stream: UnixStream,
    queue: mpsc::Sender<Queued>,
    sent: AtomicU64,
}

enum Queued {
    Message(Message),
    /// Answered when everything queued before is sent.
    Fence(mpsc::Sender<()>),
}

impl SocketTransport {
    /// Connects process `here`, whose stream to process `i` is `streams[i]`; its own is `None`.
    ///
    /// # Errors
    /// If a stream cannot be cloned for the thread that sends.
    pub fn new(here: usize, streams: Vec<Option<UnixStream>>) -> io::Result<Arc<Self>> {
        let connect = |stream: UnixStream| {
            let (queue, queued) = mpsc::channel();
            let writer = BufWriter::new(stream.try_clone()?);
            thread::spawn(move || send_all(writer, queued));
            Ok(Connection {
                stream,
                queue,
                sent: AtomicU64::new(0),
            })
        };
        let connections = streams
            .into_iter()
            .map(|stream| stream.map(connect).transpose())
            .collect::<io::Result<_>>()?;
        Ok(Arc::new(Self { here, connections }))
    }

    /// Waits until everything that was queued is sent, or cannot be: a process calls it before it
    /// ends.
    pub fn flush(&self) {
        for connection in self.connections.iter().flatten() {
            let (done, is_done) = mpsc::channel();
            if connection.queue.send(Queued::Fence(done)).is_ok() {
                let _ = is_done.recv();
            }
        }
    }
}

impl Transport for SocketTransport {
    fn processes(&self) -> usize {
        self.connections.len()
    }

    fn process_index(&self) -> usize {
        self.here
    }

    fn send(&self, to: usize, message: Message) {
        let connection = self.connections[to]
            .as_ref()
            .expect("no process sends to itself");
        let bytes = lengths(&message).sum::<usize>() as u64;
        connection.sent.fetch_add(bytes, Ordering::SeqCst);
        // The thread that sends has ended if the connection is lost, which the one that receives
        // reports.
        let _ = connection.queue.send(Queued::Message(message));
    }

    fn sent(&self) -> Vec<u64> {
        let sent = |connection: &Connection| connection.sent.load(Ordering::SeqCst);
        self.connections
            .iter()
            .map(|connection| connection.as_ref().map_or(0, sent))
            .collect()
    }

    fn set_handler(&self, handler: Arc<dyn MessageHandler>) {
        for (from, connection) in self.connections.iter().enumerate() {
            let Some(Connection { stream, .. }) = connection else {
                continue;
            };
            let (handler, stream) = (handler.clone(), stream.try_clone());
            thread::spawn(move || {
                let ended =
                    stream.and_then(|stream| receive_all(BufReader::new(stream), from, &*handler));
                let problem = ended.map_or_else(
                    |error| error.to_string(),
                    |()| "its process has ended".into(),
                );
                handler.lost(Some(from), &problem);
            });
        }
    }
}

/// Returns the lengths of the header and of each payload.
fn lengths(message: &Message) -> impl Iterator<Item = usize> {
    let payloads = message
        .payloads
        .iter()
        .map(|payload| payload.as_ref().as_ref().len());
    [message.header.len()].into_iter().chain(payloads)
}

fn send_all(mut stream: impl Write, queued: mpsc::Receiver<Queued>) -> io::Result<()> {
    for queued in queued {
        match queued {
            Queued::Message(message) => send(&mut stream, &message)?,
            Queued::Fence(done) => {
                // The process that flushes may have stopped waiting.
                let _ = done.send(());
            }
        }
    }
    Ok(())
}

fn send(stream: &mut impl Write, message: &Message) -> io::Result<()> {
    message.taken.iter().for_each(SendStamp::note);
    let numbers = [1 + message.payloads.len()]
        .into_iter()
        .chain(lengths(message));
    let numbers: Vec<u8> = numbers
        .flat_map(|number| (number as u64).to_le_bytes())
        .collect();
    stream.write_all(&numbers)?;
    stream.write_all(&message.header)?;
    for payload in &message.payloads {
        stream.write_all(payload.as_ref().as_ref())?;
    }
    stream.flush()
}

/// Passes messages to `handler` until the other process closes the connection between two messages.
fn receive_all(mut stream: impl Read, from: usize, handler: &dyn MessageHandler) -> io::Result<()> {
    for number in 0.. {
        let Some(count) = receive_number(&mut stream)? else {
            return Ok(());
        };
        let lost = || io::Error::from(io::ErrorKind::UnexpectedEof);
        let mut lengths = (0..count)
            .map(|_| receive_number(&mut stream)?.ok_or_else(lost))
            .collect::<io::Result<Vec<_>>>()?;
        let header = receive(&mut stream, lengths.remove(0))?;
        let mut buffers = handler.header(from, header, &lengths);
        for (buffer, length) in buffers.iter_mut().zip(lengths) {
            write(buffer, &receive(&mut stream, length)?);
        }
        // SAFETY: every buffer was written.
        unsafe { handler.arrived(from, number, buffers) };
    }
    Ok(())
}

/// Returns the next number, or `None` if the connection was closed before it.
fn receive_number(stream: &mut impl Read) -> io::Result<Option<usize>> {
    let mut bytes = [0; 8];
    let first = stream.read(&mut bytes)?;
    if first == 0 {
        return Ok(None);
    }
    stream.read_exact(&mut bytes[first..])?;
    Ok(Some(u64::from_le_bytes(bytes) as usize))
}

fn receive(stream: &mut impl Read, length: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; length];
    stream.read_exact(&mut bytes).map(|()| bytes)
}

fn write(buffer: &mut Box<dyn RecvBuffer>, bytes: &[u8]) {
    let space: &mut [MaybeUninit<u8>] = buffer.space();
    space.write_copy_of_slice(bytes);
}

impl fmt::Debug for SocketTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SocketTransport({} of {})", self.here, self.processes())
    }
}
