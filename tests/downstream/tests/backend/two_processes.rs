//! Runs a test in two processes that a socket connects.

use std::env;
use std::io::stdin;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread;

use downstream::socket::SocketTransport;

/// Names the test that the process runs as process 1.
const SECOND: &str = "DOWNSTREAM_SECOND_PROCESS";

/// Runs `body` in this process, and in another one that runs the same test, with the path `test`,
/// alone.
///
/// # Panics
/// If the test fails in the other process, with everything that this process printed.
pub fn in_two_processes(test: &str, body: impl Fn(Arc<SocketTransport>)) {
    let run = |here, streams| {
        let transport = SocketTransport::new(here, streams).expect("the stream can be cloned");
        body(transport.clone());
        transport.flush();
    };
    if env::var_os(SECOND).is_some_and(|second| second == test) {
        let stream = stdin()
            .as_fd()
            .try_clone_to_owned()
            .expect("the socket is the standard input");
        return run(1, vec![Some(stream.into()), None]);
    }
    let (own, its) = UnixStream::pair().expect("a pair of sockets");
    let program = env::current_exe().expect("the test program");
    let mut command = Command::new(program);
    command
        .args([test, "--exact", "--nocapture"])
        .env(SECOND, test)
        .stdin(OwnedFd::from(its));
    let second = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the test program starts");
    // It still holds the end of the socket that the other process has.
    drop(command);
    let second = thread::spawn(|| second.wait_with_output());
    run(0, vec![None, Some(own)]);
    let output = second
        .join()
        .expect("the thread only waits")
        .expect("the process was started");
    let [text, errors] =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(
        output.status.success() && text.contains("running 1 test"),
        "process 1: {text}{errors}"
    );
}
