//! Parsers of hostile bytes: of the manifest and of headers of safetensors files, which a load
//! reads before the data.
//!
//! `cargo test` runs the corpus, random changes of it and inputs that aim at memory. The script
//! `run` in this package fuzzes with coverage as a guide.
//!
//! An input that panics, breaks a rule, or takes more memory than a constant times its length is a
//! find.

mod checkpoint;
#[path = "../../../src/checkpoint/manifest/tests/rules.rs"]
mod rules;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use checkpoint::manifest::Manifest;
use checkpoint::safetensors_file::header::{parse_header, parse_index};
use rules::assert_valid;
use twox_hash::XxHash3_64;

/// Bytes of memory for each byte of input, and for any input.
const FACTOR: usize = 32;
const CONSTANT: usize = 16 << 10;

thread_local! {
    /// Bytes that the thread has allocated, and the most there were since this was set.
    static LIVE: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
}

/// The system's allocator, which counts.
struct Counting;

fn count(taken: usize, given_back: usize) {
    // Not at the end of a thread, when there is no counter any more.
    let _ = LIVE.try_with(|live| {
        let (now, most) = live.get();
        // A thread may free what another allocated.
        let now = (now + taken).saturating_sub(given_back);
        live.set((now, most.max(now)));
    });
}

// SAFETY: all calls are passed on.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size(), 0);
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        count(0, layout.size());
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // Both may exist for a time.
        count(size, 0);
        count(0, layout.size());
        unsafe { System.realloc(memory, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Runs `parse`, which must take little memory for an input of this length.
fn bounded<T>(len: usize, parse: impl FnOnce() -> T) -> T {
    let (before, _) = LIVE.get();
    LIVE.set((before, before));
    let parsed = parse();
    let most = LIVE.get().1 - before;
    assert!(
        most <= FACTOR * len + CONSTANT,
        "{most} bytes of memory for an input of {len}"
    );
    parsed
}

/// Parses bytes as a manifest, and as the contents of one with the right checksum. Returns true if
/// either is one.
pub fn manifest(bytes: &[u8]) -> bool {
    let checksum = XxHash3_64::oneshot(bytes);
    let begin = format!(
        r#"{{"format":"burn-dtensor checkpoint","version":1,"checksum":"{checksum:016x}","manifest":"#
    );
    let framed = [begin.as_bytes(), bytes, b"}\n"].concat();
    [bytes, &framed].into_iter().any(|bytes| {
        match bounded(bytes.len(), || Manifest::parse(bytes)) {
            Ok(manifest) => {
                assert_valid(&manifest);
                assert_eq!(Manifest::parse(&manifest.to_bytes()), Ok(manifest));
                true
            }
            Err(error) => error.to_string().is_empty(),
        }
    })
}

/// Parses bytes as the JSON of a header and as an index. The first two bytes are the length of the
/// data after the header. Returns true if they are either.
pub fn header(bytes: &[u8]) -> bool {
    let Some((data, json)) = bytes.split_first_chunk() else {
        return false;
    };
    let len = 8 + json.len() as u64 + u64::from(u16::from_le_bytes(*data));
    let tensors = bounded(json.len(), || parse_header(json, len, 0));
    for entry in tensors.iter().flat_map(|tensors| tensors.values()) {
        assert!(
            entry
                .chunks
                .iter()
                .all(|chunk| chunk.bytes(entry.dtype).end <= len)
        );
    }
    tensors.is_ok() | bounded(json.len(), || parse_index(json)).is_ok()
}
