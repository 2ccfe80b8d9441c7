//! Programs of a few threads that read a weight, under many schedules.

use std::cell::Cell;
use std::convert::Infallible;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};
use shuttle::thread::{self, JoinHandle};
use shuttle::{Runner, sync::atomic::AtomicBool};

use crate::memory::{Bytes, Heap, Slice, Values};
use crate::storage::Refill;
use crate::storage::slot::{self, StorageReadError};
use crate::storage::unshard_state::{After, InSlot, StoredWeight, UnshardState};

/// A program of the thread that gathered, and of those that it starts.
type Check = fn(Pass);

/// Every check, by name.
pub const CHECKS: [(&str, Check); 14] = [
    (
        "readers_meet_the_end_of_forward",
        readers_meet_the_end_of_forward,
    ),
    (
        "another_thread_takes_nothing_back",
        another_thread_takes_nothing_back,
    ),
    ("readers_at_once_gather_once", readers_at_once_gather_once),
    ("threads_share_a_view", threads_share_a_view),
    (
        "backward_gathers_while_another_thread_reads",
        backward_gathers_while_another_thread_reads,
    ),
    ("a_view_outlives_its_pass", a_view_outlives_its_pass),
    ("a_pass_that_unwinds_lets_go", a_pass_that_unwinds_lets_go),
    (
        "a_view_that_goes_takes_nothing_along",
        a_view_that_goes_takes_nothing_along,
    ),
    (
        "what_was_gathered_again_is_not_taken_back",
        what_was_gathered_again_is_not_taken_back,
    ),
    ("who_writes_has_a_copy", who_writes_has_a_copy),
    ("who_may_not_copy_is_told", who_may_not_copy_is_told),
    (
        "what_is_kept_is_freed_by_hand",
        what_is_kept_is_freed_by_hand,
    ),
    (
        "passes_that_share_weights_end_on_two_threads",
        passes_that_share_weights_end_on_two_threads,
    ),
    (
        "a_forward_that_failed_is_told",
        a_forward_that_failed_is_told,
    ),
];

const WEIGHT: Values = [1, 2];
/// Of the parameter beside it, which is in no slot.
const OTHER: Values = [3, 4];

type EvictableStorage = slot::EvictableStorage<Bytes, ()>;
type StorageView = slot::StorageView<Bytes, ()>;

/// A unit's weights: one in a slot that was gathered on this thread, and one beside it.
pub struct Pass {
    source: Arc<Source>,
    slot: Arc<EvictableStorage>,
    /// Forward's memory of the first.
    forward: Slice,
    in_forward: Cell<bool>,
}

struct Source {
    gathered: UnshardState<Gathering, EvictableStorage, Tensor>,
    heap: Heap,
    /// How often the all-gather was waited for.
    waits: Arc<AtomicUsize>,
}

/// A weight as operations get it.
#[derive(Clone)]
enum Tensor {
    StorageView(Arc<StorageView>),
    Own(Arc<Bytes>),
}

/// An all-gather under way. One of ranks has no copies; this one has, so that a check must tell.
#[derive(Clone)]
struct Gathering {
    heap: Heap,
    waits: Arc<AtomicUsize>,
}

impl Gathering {
    fn wait(self, _: bool) -> Vec<Tensor> {
        // The other ranks take their time.
        AtomicBool::new(false).load(SeqCst);
        assert_eq!(self.waits.fetch_add(1, SeqCst), 0, "waited for twice");
        [WEIGHT, OTHER]
            .map(|values| Tensor::Own(Arc::new(Bytes::new(&self.heap, values))))
            .into()
    }
}

impl Tensor {
    /// Where an operation reads.
    fn slice(&self) -> Slice {
        match self {
            Self::StorageView(view) => slice(view),
            Self::Own(bytes) => bytes.slice(),
        }
    }
}

impl EvictableStorage {
    fn fill(&self, tensor: Tensor) {
        match tensor {
            Tensor::Own(bytes) => self.restore(Arc::into_inner(bytes).expect("the only handle")),
            Tensor::StorageView(_) => unreachable!("an all-gather makes no views"),
        }
    }
}

impl Source {
    fn issue(&self) -> Gathering {
        Gathering {
            heap: self.heap.clone(),
            waits: self.waits.clone(),
        }
    }

    /// What backward computes with.
    fn backward_weight(&self, position: usize, shared: bool) -> Option<Tensor> {
        self.gathered
            .backward_weight(position, shared, Gathering::wait, EvictableStorage::fill)
    }
}

impl Refill for Source {
    fn refill(&self) {
        self.gathered
            .refill(Gathering::wait, EvictableStorage::fill);
    }
}

impl Pass {
    fn gather(heap: &Heap) -> Self {
        let source = Arc::new(Source {
            gathered: UnshardState::new(),
            heap: heap.clone(),
            waits: Arc::default(),
        });
        let memory = Bytes::new(heap, WEIGHT);
        let forward = memory.slice();
        let slot = EvictableStorage::new(memory, (), source.clone());
        source.gathered.begin_pass();
        let Ok(()) = source.gathered.unshard(|_| {
            let view = Tensor::StorageView(Arc::new(StorageView::new(slot.clone())));
            let other = Tensor::Own(Arc::new(Bytes::new(heap, OTHER)));
            Ok::<_, Infallible>(vec![
                StoredWeight::InSlot(InSlot {
                    view,
                    slot: slot.clone(),
                }),
                StoredWeight::Own(other),
            ])
        });
        Self {
            source,
            slot,
            forward,
            in_forward: Cell::new(true),
        }
    }

    fn slot(&self) -> Arc<EvictableStorage> {
        self.slot.clone()
    }

    fn view(&self) -> StorageView {
        StorageView::new(self.slot())
    }

    /// The end of forward.
    fn leave(&self) {
        self.leave_to(After::Gather(self.source.issue()));
        assert!(self.forward.is_freed(), "taken back when forward has ended");
    }

    fn leave_to(&self, after: After<Gathering>) {
        self.in_forward.set(false);
        self.source
            .gathered
            .leave(after, EvictableStorage::evict);
    }

    fn waits(&self) -> usize {
        self.source.waits.load(SeqCst)
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        self.source.gathered.end_pass(self.in_forward.get());
    }
}

/// Where an operation reads: the lock is let go of, as a tensor's bytes have no room for a guard.
fn slice(view: &StorageView) -> Slice {
    view.read(true).expect("a weight").slice()
}

fn read(view: &StorageView) {
    assert_eq!(slice(view).read(), WEIGHT);
}

fn reader(view: StorageView) -> JoinHandle<()> {
    thread::spawn(move || read(&view))
}

fn join(threads: impl IntoIterator<Item = JoinHandle<()>>) {
    threads
        .into_iter()
        .for_each(|thread| thread.join().unwrap());
}

/// Which schedules to try.
#[derive(Clone, Copy)]
pub struct Schedules {
    pub seed: u64,
    /// Of each check.
    pub count: usize,
}

impl Schedules {
    /// Runs `program` where its pass is gathered; half of the schedules are random, half have few
    /// preemptions (PCT). In the end every buffer has been freed.
    pub fn check(self, program: Check) {
        let count = self.count.div_ceil(2);
        run(RandomScheduler::new_from_seed(self.seed, count), 0, program);
        run(
            PctScheduler::new_from_seed(self.seed, 3, count),
            count,
            program,
        );
    }
}

fn run(scheduler: impl Scheduler + 'static, before: usize, program: Check) {
    let schedule = Arc::new(AtomicUsize::new(before));
    let counted = schedule.clone();
    let program = move || {
        counted.fetch_add(1, SeqCst);
        let heap = Heap::default();
        program(Pass::gather(&heap));
        assert_eq!(heap.load(SeqCst), 0, "every buffer is freed");
    };
    let ran = catch_unwind(AssertUnwindSafe(|| {
        Runner::new(scheduler, Default::default()).run(program)
    }));
    if let Err(panic) = ran {
        println!("failed in schedule {}", schedule.load(SeqCst));
        resume_unwind(panic);
    }
}

fn readers_meet_the_end_of_forward(pass: Pass) {
    let (here, elsewhere) = (pass.view(), [pass.view(), pass.view()].map(reader));
    read(&here);
    pass.leave();
    read(&here);
    join(elsewhere);
    assert_eq!(pass.waits(), 1);
}

fn another_thread_takes_nothing_back(pass: Pass) {
    let slot = pass.slot();
    let other = thread::spawn(move || slot.evict());
    let view = pass.view();
    read(&view);
    join([other]);
    read(&view);
    assert_eq!(pass.waits(), 0);
    pass.leave();
}

fn readers_at_once_gather_once(pass: Pass) {
    let (here, elsewhere) = (pass.view(), [pass.view(), pass.view()]);
    pass.leave();
    let elsewhere = elsewhere.map(reader);
    read(&here);
    join(elsewhere);
    assert_eq!(pass.waits(), 1);
}

fn threads_share_a_view(pass: Pass) {
    let view = Arc::new(pass.view());
    let elsewhere = [view.clone(), view.clone()].map(|view| {
        thread::spawn(move || {
            read(&view);
            read(&view);
        })
    });
    read(&view);
    pass.leave();
    read(&view);
    join(elsewhere);
    assert!(pass.waits() <= 1);
}

/// Backward asks for the weights itself: also for one in no slot, which is given out once.
fn backward_gathers_while_another_thread_reads(pass: Pass) {
    let elsewhere = reader(pass.view());
    pass.leave();
    pass.source.refill();
    read(&pass.view());
    assert!(
        [true, false].iter().all(|&shared| pass
            .source
            .backward_weight(0, shared)
            .expect("a view")
            .slice()
            .read()
            == WEIGHT)
    );
    assert!(
        [true, false].iter().all(|&shared| pass
            .source
            .backward_weight(1, shared)
            .expect("whole")
            .slice()
            .read()
            == OTHER)
    );
    assert!(pass.source.backward_weight(1, false).is_none(), "given out once");
    join([elsewhere]);
    assert_eq!(pass.waits(), 1);
}

fn a_view_outlives_its_pass(pass: Pass) {
    let view = pass.view();
    let other = thread::spawn(move || {
        read(&view);
        read(&view);
    });
    pass.leave();
    drop(pass);
    join([other]);
}

/// It and its views hold each other until then.
fn a_pass_that_unwinds_lets_go(pass: Pass) {
    let view = pass.view();
    let other = reader(pass.view());
    drop(pass);
    read(&view);
    join([other]);
}

fn a_view_that_goes_takes_nothing_along(pass: Pass) {
    let [kept, here, elsewhere] = [pass.view(), pass.view(), pass.view()];
    let other = thread::spawn(move || drop(elsewhere));
    let reads = slice(&kept);
    drop(here);
    assert_eq!(reads.read(), WEIGHT);
    join([other]);
    assert_eq!(reads.read(), WEIGHT);
    assert_eq!(pass.waits(), 0);
}

fn what_was_gathered_again_is_not_taken_back(pass: Pass) {
    let (here, elsewhere) = (pass.view(), reader(pass.view()));
    pass.leave();
    let reads = slice(&here);
    pass.slot().evict();
    // Nor is it filled twice.
    pass.slot().restore(Bytes::new(&pass.source.heap, OTHER));
    assert_eq!(reads.read(), WEIGHT);
    read(&here);
    join([elsewhere]);
}

fn who_writes_has_a_copy(pass: Pass) {
    let (here, mut elsewhere) = (pass.view(), pass.view());
    let writer = thread::spawn(move || {
        elsewhere.write(true).expect("a weight").write(OTHER);
        assert_eq!(slice(&elsewhere).read(), OTHER);
    });
    read(&here);
    pass.leave();
    read(&here);
    let mut own = pass.view();
    own.write(true).expect("a weight").write(OTHER);
    read(&here);
    join([writer]);
}

fn who_may_not_copy_is_told(pass: Pass) {
    let (here, mut elsewhere) = (pass.view(), pass.view());
    let other = thread::spawn(move || {
        match elsewhere.read(false) {
            // Gathered again, which is read in place.
            Ok(place) => assert_eq!(place.slice().read(), WEIGHT),
            Err(unread) => assert!(matches!(unread, StorageReadError::WouldCopy)),
        }
        assert!(matches!(
            elsewhere.write(false),
            Err(StorageReadError::WouldCopy)
        ));
    });
    assert_eq!(here.read(false).expect("in place").slice().read(), WEIGHT);
    pass.leave();
    assert_eq!(
        here.read(false).expect("gathered again").slice().read(),
        WEIGHT
    );
    join([other]);
}

/// Weights that forward has kept for backward, freed by hand under a view that another thread
/// reads.
fn what_is_kept_is_freed_by_hand(pass: Pass) {
    let (here, elsewhere) = (pass.view(), pass.view());
    let other = reader(elsewhere);
    pass.leave_to(After::Keep { share: false });
    read(&here);
    pass.source
        .gathered
        .reshard(|| pass.source.issue(), EvictableStorage::evict);
    read(&here);
    join([other]);
}

/// Two passes use the weights of one forward. They are freed by hand while one of them ends on
/// another thread.
fn passes_that_share_weights_end_on_two_threads(pass: Pass) {
    let view = pass.view();
    pass.leave_to(After::Keep { share: true });
    pass.source.gathered.begin_pass();
    pass.source
        .gathered
        .leave(After::Keep { share: true }, EvictableStorage::evict);
    let source = pass.source.clone();
    let other = thread::spawn(move || {
        assert_eq!(
            source.backward_weight(0, false).expect("a view").slice().read(),
            WEIGHT
        );
        source.gathered.end_pass(false);
    });
    pass.source
        .gathered
        .reshard(|| pass.source.issue(), EvictableStorage::evict);
    read(&view);
    assert_eq!(
        pass.source
            .backward_weight(1, true)
            .expect("the first pass has not ended")
            .slice()
            .read(),
        OTHER
    );
    join([other]);
}

/// Nothing is issued: whoever has no copy by then has nothing to read, and does not wait for it.
fn a_forward_that_failed_is_told(pass: Pass) {
    let (here, elsewhere) = (pass.view(), pass.view());
    let other = thread::spawn(move || match elsewhere.read(true) {
        Ok(place) => assert_eq!(place.slice().read(), WEIGHT),
        Err(unread) => assert!(matches!(unread, StorageReadError::NotRestored)),
    });
    pass.leave_to(After::Free);
    assert!(matches!(here.read(true), Err(StorageReadError::NotRestored)));
    join([other]);
}
