//! Memory that shows when it is read after it was freed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering::SeqCst};

use shuttle::sync::atomic::AtomicBool;

use crate::storage::slot::StorageMemory;

/// A weight, or what was written over it.
pub type Values = [u8; 2];

const FREED: Values = [0xdd; 2];

/// How many buffers there are.
pub type Heap = Arc<AtomicUsize>;

/// A buffer, overwritten when it is freed.
pub struct Bytes {
    cells: Arc<Cells>,
    heap: Heap,
}

struct Cells {
    values: [AtomicU8; 2],
    /// What reading a value touches, for a step: other threads may run before it.
    step: AtomicBool,
}

/// A slice whose lifetime the compiler has been told to forget.
#[derive(Clone)]
pub struct Slice(Arc<Cells>);

impl Bytes {
    pub fn new(heap: &Heap, values: Values) -> Self {
        heap.fetch_add(1, SeqCst);
        let cells = Cells {
            values: values.map(AtomicU8::new),
            step: AtomicBool::new(false),
        };
        Self {
            cells: Arc::new(cells),
            heap: heap.clone(),
        }
    }

    pub fn slice(&self) -> Slice {
        Slice(self.cells.clone())
    }

    pub fn write(&mut self, values: Values) {
        self.cells.write(values);
    }
}

impl StorageMemory for Bytes {
    fn copy(&self) -> Self {
        Self::new(&self.heap, self.slice().read())
    }
}

/// Without a step: shuttle's own unwinding drops buffers too.
impl Drop for Bytes {
    fn drop(&mut self) {
        assert_ne!(self.heap.fetch_sub(1, SeqCst), 0, "freed once");
        self.cells.write(FREED);
    }
}

impl Slice {
    pub fn read(&self) -> Values {
        self.0.values.each_ref().map(|value| {
            self.0.step.load(SeqCst);
            value.load(SeqCst)
        })
    }

    pub fn is_freed(&self) -> bool {
        self.read() == FREED
    }
}

impl Cells {
    fn write(&self, values: Values) {
        self.values
            .iter()
            .zip(values)
            .for_each(|(cell, value)| cell.store(value, SeqCst));
    }
}
