//! [`Together`]: a result that all ranks of a process get alike, made by those that wait for it, and there once.
//!
//! Each rank takes pieces of the work until there are none left. Who comes when it is made takes a handle.
//!
//! ```text
//! rank 0   waits: | piece 0 | piece 2 | piece 3 |  a handle
//! rank 1              waits: |  piece 1    |       a handle
//! rank 2                                              waits: a handle
//! ```
//!
//! A tensor is a handle anyway, and burn writes in place to the memory of the only one: which of two ranks writes first gets
//! memory of its own. So nobody notices but by time and memory.
//!
//! A rank that has taken a piece may be kept from making it: by another program, or by what its thread pool does meanwhile. Who
//! has waited for it while [nothing moved](PATIENCE) makes all by itself, for itself.

use std::hint::spin_loop;
use std::mem;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use burn::backend::flex::{FlexTensor, Layout};
use burn::tensor::{Bytes, DType};

use super::super::sync::{Condvar, Mutex};
use super::shelf::Owner;
use crate::kernels::flex::{Ends, Targets};
use crate::memory::Home;

/// Bytes that all ranks would move, were each to make its own result, from which on it pays to come to terms.
pub(super) const WORTH: usize = 512 << 10;

/// Pieces for each rank, so that one that is late delays little.
pub(super) const PIECES: usize = 4;

/// How often a rank that has a core of its own looks whether the others are done before it sleeps: a piece takes some 50
/// microseconds.
const LOOKS: usize = 1000;

/// How long a rank waits for a piece of another's while none is made.
const PATIENCE: Duration = Duration::from_millis(250);

/// How results are made, piece by piece.
///
/// # Safety
/// The pieces are all of the results, and no two have an element in common.
pub(super) unsafe trait Job {
    /// How it is cut into pieces.
    type Cut: Send + Sync;

    /// New memory, how the job is cut, and into how many pieces: at least one.
    fn begin(&self, home: &Arc<Home>) -> (Targets, Self::Cut, usize);

    /// Writes piece `index` of what begins where `to` says.
    ///
    /// # Safety
    /// `cut` and `to` are of one [`begin`](Self::begin), nobody else writes this piece, and nobody reads.
    unsafe fn make(&self, cut: &Self::Cut, index: usize, to: &Ends<u8>);

    /// The results.
    ///
    /// # Safety
    /// All pieces are written.
    unsafe fn finish(&self, targets: Targets) -> Vec<FlexTensor>;
}

/// Results of a [`Job`] whose cut is a `C`.
pub(super) struct Together<C> {
    state: Mutex<State<C>>,
    changed: Condvar,
}

enum State<C> {
    /// Nobody has begun, or somebody has failed.
    Open,
    Making(Arc<Making<C>>),
    /// For as long as they are there.
    Made(Box<[Held]>),
}

/// Results that are being made.
struct Making<C> {
    cut: C,
    count: usize,
    /// Where the targets begin, which stay where they are until all is made.
    to: OnceLock<Ends<u8>>,
    targets: Mutex<Option<Targets>>,
    /// The next piece that nobody has taken.
    next: AtomicUsize,
    /// Pieces that are not made.
    left: AtomicUsize,
    made: OnceLock<Vec<FlexTensor>>,
    has_failed: AtomicBool,
}

/// A tensor, if somebody has a handle.
struct Held {
    data: Weak<Bytes>,
    layout: Layout,
    dtype: DType,
}

impl Held {
    fn of(tensor: &FlexTensor) -> Self {
        Self { data: Arc::downgrade(&tensor.data_arc()), layout: tensor.layout().clone(), dtype: tensor.dtype() }
    }

    fn get(&self) -> Option<FlexTensor> {
        Some(FlexTensor::from_arc(self.data.upgrade()?, self.layout.clone(), self.dtype))
    }
}

impl<C> Making<C> {
    fn begin(job: &impl Job<Cut = C>, home: &Arc<Home>) -> Arc<Self> {
        let (targets, cut, count) = job.begin(home);
        let this = Arc::new(Self {
            cut,
            count,
            to: OnceLock::new(),
            targets: Mutex::new(Some(targets)),
            next: AtomicUsize::new(0),
            left: AtomicUsize::new(count),
            made: OnceLock::new(),
            has_failed: AtomicBool::new(false),
        });
        // Only now they are where they stay.
        let to = this.targets.lock().as_mut().map(Targets::ends);
        this.to.get_or_init(|| to.expect("they are there until all is made"));
        this
    }

    /// A piece that is the caller's to make.
    fn take(&self) -> Option<usize> {
        let index = self.next.fetch_add(1, Ordering::Relaxed);
        (index < self.count && !self.has_failed.load(Ordering::Relaxed)).then_some(index)
    }

    /// Makes piece `index`. True: all are made, and seen here.
    ///
    /// # Safety
    /// Only the caller has taken it, of what this job, or another rank's same one, has begun.
    unsafe fn make(&self, job: &impl Job<Cut = C>, index: usize) -> bool {
        let to = self.to.get().expect("known since it was begun");
        // SAFETY: the caller's; nobody has the results before all pieces are made.
        unsafe { job.make(&self.cut, index, to) };
        self.left.fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// The results.
    ///
    /// # Safety
    /// All pieces are made, of what this job, or another rank's same one, has begun.
    unsafe fn finish(&self, job: &impl Job<Cut = C>) -> Vec<FlexTensor> {
        let targets = self.targets.lock().take().expect("the last piece is made once");
        // SAFETY: the caller's.
        unsafe { job.finish(targets) }
    }

    fn is_over(&self) -> bool {
        self.made.get().is_some() || self.has_failed.load(Ordering::Acquire)
    }
}

impl<C> Default for Together<C> {
    fn default() -> Self {
        Self { state: Mutex::new(State::Open), changed: Condvar::default() }
    }
}

impl<C> Together<C> {
    /// The results of `job`, which are `owner`'s: made here, by others, or together.
    ///
    /// # Safety
    /// All jobs that it is called with make the same.
    pub unsafe fn get(&self, job: &impl Job<Cut = C>, owner: Owner) -> Vec<FlexTensor> {
        loop {
            let making = match self.find(job, owner) {
                Ok(made) => return made,
                Err(making) => making,
            };
            while let Some(index) = making.take() {
                let failing = Failing { of: self, making: &making };
                // SAFETY: the piece was taken once; all jobs are the same.
                unsafe {
                    if making.make(job, index) {
                        self.put(&making, making.finish(job), owner);
                    }
                }
                mem::forget(failing);
            }
            let has_come = owner.wait(|have_cores| self.await_others(&making, have_cores));
            match making.made.get() {
                Some(made) => return made.clone(),
                None if has_come => {}
                None => return alone(job, owner),
            }
        }
    }

    /// The results, if they are there; otherwise those that are being made, from now on at least.
    fn find(&self, job: &impl Job<Cut = C>, owner: Owner) -> Result<Vec<FlexTensor>, Arc<Making<C>>> {
        // Of several tensors some may be there, until this is the last handle: to be dropped without the lock.
        let found: Vec<Option<FlexTensor>>;
        let mut state = self.state.lock();
        match &*state {
            State::Making(making) => return Err(making.clone()),
            State::Made(held) => {
                found = held.iter().map(Held::get).collect();
                if found.iter().all(Option::is_some) {
                    return Ok(found.into_iter().flatten().collect());
                }
            }
            State::Open => {}
        }
        owner.begin();
        let making = Making::begin(job, owner.home());
        *state = State::Making(making.clone());
        Err(making)
    }

    /// Has `made`, which all ranks have made, found from now on.
    fn put(&self, making: &Making<C>, made: Vec<FlexTensor>, owner: Owner) {
        owner.keep(&made);
        let held = made.iter().map(Held::of).collect();
        let _ = making.made.set(made);
        *self.state.lock() = State::Made(held);
        self.changed.notify_all();
    }

    /// Waits until others have made the pieces that they have taken, or one of them has failed. False: that may take for
    /// ever.
    fn await_others(&self, making: &Making<C>, have_cores: bool) -> bool {
        for _ in 0..if have_cores { LOOKS } else { 0 } {
            if making.is_over() {
                return true;
            }
            spin_loop();
        }
        let mut before = making.left.load(Ordering::Relaxed);
        let mut state = self.state.lock();
        while !making.is_over() {
            let is_late;
            (state, is_late) = self.changed.wait_until(state, Instant::now() + PATIENCE);
            let left = making.left.load(Ordering::Relaxed);
            if is_late && left == before {
                return making.is_over();
            }
            before = left;
        }
        true
    }
}

/// The results of `job` for this rank alone.
fn alone<C>(job: &impl Job<Cut = C>, owner: Owner) -> Vec<FlexTensor> {
    let making = Making::begin(job, owner.home());
    // SAFETY: each piece is made here, once.
    unsafe {
        (0..making.count).for_each(|index| _ = making.make(job, index));
        making.finish(job)
    }
}

/// Dropped by a rank that panics while it makes a piece: others begin anew.
struct Failing<'a, C> {
    of: &'a Together<C>,
    making: &'a Arc<Making<C>>,
}

impl<C> Drop for Failing<'_, C> {
    fn drop(&mut self) {
        let mut state = self.of.state.lock();
        if matches!(&*state, State::Making(making) if Arc::ptr_eq(making, self.making)) {
            *state = State::Open;
        }
        self.making.has_failed.store(true, Ordering::Release);
        drop(state);
        self.of.changed.notify_all();
    }
}

impl<C> std::fmt::Debug for Together<C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Together").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::sync::{Barrier, mpsc};
    use std::thread;

    use burn::tensor::Shape;

    use super::super::shelf::{Bag, Keep, Shelf};
    use super::*;
    use crate::comm::local::board::{Board, Ticket};

    /// Numbers from 0 in pieces of 100, before each of which something happens.
    struct Numbers<F> {
        pieces: usize,
        begun: AtomicUsize,
        before: F,
    }

    impl<F: Fn(usize)> Numbers<F> {
        fn new(pieces: usize, before: F) -> Self {
            Self { pieces, begun: AtomicUsize::new(0), before }
        }

        fn shape(&self) -> Shape {
            Shape::from([100 * self.pieces])
        }
    }

    // SAFETY: a hundred numbers each, one after another.
    unsafe impl<F: Fn(usize)> Job for Numbers<F> {
        type Cut = ();

        fn begin(&self, home: &Arc<Home>) -> (Targets, (), usize) {
            self.begun.fetch_add(1, Ordering::SeqCst);
            (Targets::new(Some(home), [&self.shape()], size_of::<i64>()), (), self.pieces)
        }

        unsafe fn make(&self, (): &(), index: usize, to: &Ends<u8>) {
            (self.before)(index);
            for number in 100 * index..100 * (index + 1) {
                // SAFETY: inside, in this piece's place.
                unsafe { to.start(0).cast::<i64>().add(number).write(number as i64) };
            }
        }

        unsafe fn finish(&self, targets: Targets) -> Vec<FlexTensor> {
            // SAFETY: all pieces are written.
            unsafe { targets.finish([&self.shape()], DType::I64).collect() }
        }
    }

    /// Collectives of two groups, by group and number.
    fn ticket(group: usize, seq: u64) -> Ticket {
        let mut board = Board::<crate::comm::engine::Print, ()>::new(2, false);
        let groups = ["a", "b"].map(|name| board.group(&[0, 1], name));
        Ticket { group: groups[group], member: 0, seq }
    }

    /// One collective, seen by any of its ranks.
    struct Call {
        ticket: Ticket,
        keep: Keep,
        together: Together<()>,
        bag: Arc<Bag>,
    }

    impl Call {
        fn new(group: usize, seq: u64, keep: Keep) -> Self {
            Self { ticket: ticket(group, seq), keep, together: Together::default(), bag: Arc::default() }
        }

        /// What a rank gets, and how long it waited for others.
        fn get(&self, job: &impl Job<Cut = ()>, shelf: &Shelf) -> (Vec<FlexTensor>, Duration) {
            let (Self { ticket, keep, bag, .. }, waited) = (self, Cell::default());
            let owner = Owner { shelf, ticket: *ticket, bag, keep: *keep, waited: &waited };
            // SAFETY: one job for each in these tests.
            let got = unsafe { self.together.get(job, owner) };
            (got, waited.get())
        }
    }

    fn numbers(tensors: &[FlexTensor]) -> &[i64] {
        tensors[0].storage()
    }

    fn are_numbers(tensors: &[FlexTensor]) -> bool {
        let numbers = numbers(tensors);
        numbers.iter().copied().eq(0..numbers.len() as i64)
    }

    #[test]
    fn ranks_that_wait_make_it_together_and_have_one() {
        for have_cores in [false, true] {
            let (call, shelf) = (Call::new(0, 0, Keep::Latest), Shelf::new(have_cores, None));
            // Neither rank gets on without the other: they make two pieces at once, twice.
            let both = Barrier::new(2);
            let makers = Mutex::new(Vec::new());
            let job = Numbers::new(4, |_| {
                both.wait();
                makers.lock().push(thread::current().id());
            });
            let get = || call.get(&job, &shelf).0;
            let [one, other] =
                thread::scope(|scope| [scope.spawn(get), scope.spawn(get)].map(|rank| rank.join().unwrap()));
            assert!(are_numbers(&one) && numbers(&one).len() == 400);
            assert_eq!(numbers(&one).as_ptr(), numbers(&other).as_ptr());
            assert_eq!(job.begun.load(Ordering::SeqCst), 1);
            let mut makers = mem::take(&mut *makers.lock());
            makers.dedup();
            assert!(makers.len() > 1, "{makers:?}");
        }
    }

    #[test]
    fn who_comes_later_takes_a_handle() {
        let (call, shelf) = (Call::new(0, 0, Keep::Latest), Shelf::new(true, None));
        let job = Numbers::new(2, |_| ());
        let get = || call.get(&job, &shelf).0;
        let address = numbers(&get()).as_ptr().addr();
        // The bag has one while nobody else does.
        assert_eq!(numbers(&get()).as_ptr().addr(), address);
        assert_eq!(job.begun.load(Ordering::SeqCst), 1);
        // Whoever has the only handle may write in place.
        let mut last = get();
        drop(call);
        assert!(last[0].is_unique());
        last[0].storage_mut::<i64>()[0] = 7;
        assert_eq!((numbers(&last)[0], numbers(&last).as_ptr().addr()), (7, address));
    }

    #[test]
    fn ranks_that_are_ahead_keep_the_latest_of_a_group_alone() {
        let (shelf, job) = (Shelf::new(true, None), Numbers::new(2, |_| ()));
        let [early, beside, late] = [(0, 0), (1, 0), (0, 1)].map(|(group, seq)| Call::new(group, seq, Keep::Latest));
        let begun = |call: &Call| {
            let before = job.begun.load(Ordering::SeqCst);
            assert!(are_numbers(&call.get(&job, &shelf).0));
            job.begun.load(Ordering::SeqCst) - before
        };
        assert_eq!([&early, &beside, &early, &beside].map(begun), [1, 1, 0, 0], "those of two groups stay");
        assert_eq!([&late, &early, &early].map(begun), [1, 1, 1], "gone, and made again");
        assert_eq!([&late, &beside].map(begun), [0, 0], "for which nothing later went");
        let held = early.get(&job, &shelf).0;
        assert_eq!(begun(&early), 0, "what a rank holds is there");
        drop(held);
    }

    #[test]
    fn what_was_there_before_makes_room_for_what_is_made() {
        let (shelf, job) = (Shelf::new(true, None), Numbers::new(1000, |_| ()));
        let address = |call: &Call| numbers(&call.get(&job, &shelf).0).as_ptr().addr();
        let [early, late] = [0, 1].map(|seq| Call::new(0, seq, Keep::Latest));
        let before = address(&early);
        // Where a sanitizer looks nothing is used again.
        assert!(cfg!(sanitized) || !cfg!(target_os = "linux") || address(&late) == before);
    }

    #[test]
    fn what_is_reduced_is_made_once_however_late_a_rank_comes() {
        let (shelf, job) = (Shelf::new(true, None), Numbers::new(2, |_| ()));
        let [early, late] = [0, 1].map(|seq| Call::new(0, seq, Keep::All));
        for call in [&early, &late, &early, &late] {
            assert!(are_numbers(&call.get(&job, &shelf).0));
        }
        assert_eq!(job.begun.load(Ordering::SeqCst), 2);
    }

    #[test]
    fn where_one_panics_others_begin_anew() {
        let (call, shelf) = (Call::new(0, 0, Keep::Latest), Shelf::new(false, None));
        // The first piece is taken while the second one is made, and panics when that is done.
        let (both, first) = (Barrier::new(2), AtomicBool::new(true));
        let job = Numbers::new(2, |index| {
            let is_first = first.load(Ordering::SeqCst);
            if is_first {
                both.wait();
                if index == 0 {
                    first.store(false, Ordering::SeqCst);
                    panic!("a rank's own mistake");
                }
            }
        });
        let get = || call.get(&job, &shelf).0;
        let ranks = thread::scope(|scope| [scope.spawn(get), scope.spawn(get)].map(thread::ScopedJoinHandle::join));
        let made: Vec<_> = ranks.into_iter().filter_map(Result::ok).collect();
        assert_eq!(made.len(), 1, "the other has panicked");
        assert!(are_numbers(&made[0]));
        assert_eq!(job.begun.load(Ordering::SeqCst), 2);
    }

    #[test]
    fn nobody_waits_for_ever_for_a_piece_that_another_has_taken() {
        let (call, shelf) = (Call::new(0, 0, Keep::Latest), Shelf::new(false, None));
        let ((tell, taken), (go, told)) = (mpsc::channel(), mpsc::channel());
        let (is_first, told) = (AtomicBool::new(true), Mutex::new(told));
        let job = Numbers::new(2, |_| {
            if is_first.swap(false, Ordering::SeqCst) {
                tell.send(()).unwrap();
                told.lock().recv().unwrap();
            }
        });
        let get = || call.get(&job, &shelf);
        thread::scope(|scope| {
            let late = scope.spawn(get);
            taken.recv().unwrap();
            let (alone, waited) = get();
            assert!(are_numbers(&alone) && waited >= PATIENCE, "{waited:?}");
            go.send(()).unwrap();
            let (late, _) = late.join().unwrap();
            assert!(are_numbers(&late) && numbers(&late).as_ptr() != numbers(&alone).as_ptr());
        });
    }
}
