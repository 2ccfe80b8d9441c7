use std::sync::{Barrier, mpsc};
use std::thread;

use burn::tensor::Shape;

use super::*;
use crate::comm::control::match_table::MatchTable;

const SPINS: SpinPolicy = SpinPolicy::Spinning(1000);
const SLEEPS: SpinPolicy = SpinPolicy::Spinning(0);

/// Job that writes the numbers from 0, 100 per task, and calls `before` at the start of each task.
struct Numbers<F> {
    tasks: usize,
    begun: AtomicUsize,
    before: F,
}

impl<F: Fn(usize) + Sync> Numbers<F> {
    fn new(tasks: usize, before: F) -> Self {
        Self {
            tasks,
            begun: AtomicUsize::new(0),
            before,
        }
    }

    fn shape(&self) -> Shape {
        Shape::from([100 * self.tasks])
    }
}

// SAFETY: each task writes a hundred numbers of its own range.
unsafe impl<F: Fn(usize) + Sync> PartitionedJob for Numbers<F> {
    type Partition = ();

    fn begin(&self, home: &Arc<HostMemoryPool>) -> (OutputBuffers, (), usize) {
        self.begun.fetch_add(1, Ordering::SeqCst);
        (
            OutputBuffers::new(Some(home), [&self.shape()], size_of::<i64>()),
            (),
            self.tasks,
        )
    }

    unsafe fn make(&self, (): &(), index: usize, to: &OutputPtrs) {
        (self.before)(index);
        for number in 100 * index..100 * (index + 1) {
            // SAFETY: inside the buffer, in the range of this task.
            unsafe { to.start(0).cast::<i64>().add(number).write(number as i64) };
        }
    }

    unsafe fn finish(&self, targets: OutputBuffers) -> Vec<FlexTensor> {
        // SAFETY: all tasks are complete.
        unsafe { targets.finish([&self.shape()], DType::I64).collect() }
    }
}

fn cache(spin: SpinPolicy) -> SharedResultCache {
    SharedResultCache::new(spin, None)
}

/// Returns the handle of a collective of two groups, by group and sequence number.
fn ticket(group: usize, seq: u64) -> OpHandle {
    let mut board = MatchTable::<crate::comm::backend::CallSignature, ()>::new(2, false);
    let groups = ["a", "b"].map(|name| board.group(&[0, 1], name));
    OpHandle {
        group: groups[group],
        member: 0,
        seq,
    }
}

/// One collective, as any of its ranks uses it.
struct Call {
    ticket: OpHandle,
    keep: ResultRetention,
    together: CooperativeResult<()>,
    cached: Arc<CachedResults>,
}

impl Call {
    fn new(group: usize, seq: u64, keep: ResultRetention) -> Self {
        Self {
            ticket: ticket(group, seq),
            keep,
            together: CooperativeResult::default(),
            cached: Arc::default(),
        }
    }

    /// Returns the results of a rank, and the time that it waited for others.
    fn get(
        &self,
        job: &impl PartitionedJob<Partition = ()>,
        cache: &SharedResultCache,
    ) -> (Vec<FlexTensor>, Duration) {
        let Self {
            ticket,
            keep,
            cached,
            ..
        } = self;
        let waited = Cell::default();
        let owner = Owner {
            cache,
            op: *ticket,
            cached,
            keep: *keep,
            waited: &waited,
        };
        // SAFETY: in these tests, each call has one job.
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
    for spin in [
        SPINS,
        SLEEPS,
        SpinPolicy::Yielding(100, Duration::from_millis(1)),
    ] {
        let call = Call::new(0, 0, ResultRetention::Latest);
        let cache = cache(spin);
        // Neither rank can continue without the other, so they perform two tasks at the same time,
        // twice.
        let both = Barrier::new(2);
        let makers = Mutex::new(Vec::new());
        let job = Numbers::new(4, |_| {
            both.wait();
            makers.lock().push(thread::current().id());
        });
        let get = || call.get(&job, &cache).0;
        let [one, other] = thread::scope(|scope| {
            [scope.spawn(get), scope.spawn(get)].map(|rank| rank.join().unwrap())
        });
        assert!(are_numbers(&one) && numbers(&one).len() == 400);
        assert_eq!(numbers(&one).as_ptr(), numbers(&other).as_ptr());
        assert_eq!(job.begun.load(Ordering::SeqCst), 1);
        let mut makers = mem::take(&mut *makers.lock());
        makers.dedup();
        assert!(makers.len() > 1, "{makers:?}");
    }
}

#[test]
fn invariant_1_all_threads_of_a_rank_take_tasks() {
    let call = Call::new(0, 0, ResultRetention::Latest);
    let cache = cache(SPINS);
    // No thread can continue without another one, so two perform tasks at the same time, twice.
    let both = Barrier::new(2);
    let job = Numbers::new(4, |_| _ = both.wait());
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(2)
        .build()
        .unwrap();
    assert!(are_numbers(&pool.install(|| call.get(&job, &cache).0)));
}

#[test]
fn who_comes_later_takes_a_handle() {
    let call = Call::new(0, 0, ResultRetention::Latest);
    let cache = cache(SPINS);
    let job = Numbers::new(2, |_| ());
    let get = || call.get(&job, &cache).0;
    let address = numbers(&get()).as_ptr().addr();
    // The cache keeps a handle while no rank has one.
    assert_eq!(numbers(&get()).as_ptr().addr(), address);
    assert_eq!(job.begun.load(Ordering::SeqCst), 1);
    // The owner of the only handle may write in place.
    let mut last = get();
    drop(call);
    assert!(last[0].is_unique());
    last[0].storage_mut::<i64>()[0] = 7;
    assert_eq!(
        (numbers(&last)[0], numbers(&last).as_ptr().addr()),
        (7, address)
    );
}

#[test]
fn fast_ranks_keep_only_the_latest_result_of_a_group() {
    let cache = cache(SPINS);
    let job = Numbers::new(2, |_| ());
    let [early, other, late] =
        [(0, 0), (1, 0), (0, 1)].map(|(group, seq)| Call::new(group, seq, ResultRetention::Latest));
    let begun = |call: &Call| {
        let before = job.begun.load(Ordering::SeqCst);
        assert!(are_numbers(&call.get(&job, &cache).0));
        job.begun.load(Ordering::SeqCst) - before
    };
    assert_eq!(
        [&early, &other, &early, &other].map(begun),
        [1, 1, 0, 0],
        "the results of two groups are kept"
    );
    assert_eq!(
        [&late, &early, &early].map(begun),
        [1, 1, 1],
        "evicted, and built a second time"
    );
    assert_eq!(
        [&late, &other].map(begun),
        [0, 0],
        "which did not evict any later result"
    );
    let held = early.get(&job, &cache).0;
    assert_eq!(begun(&early), 0, "a result that a rank holds is available");
    drop(held);
}

#[test]
fn what_was_there_before_makes_room_for_what_is_made() {
    let cache = cache(SPINS);
    let job = Numbers::new(1000, |_| ());
    let address = |call: &Call| numbers(&call.get(&job, &cache).0).as_ptr().addr();
    let [early, late] = [0, 1].map(|seq| Call::new(0, seq, ResultRetention::Latest));
    let before = address(&early);
    // With a sanitizer, memory is not reused.
    assert!(cfg!(sanitized) || !cfg!(target_os = "linux") || address(&late) == before);
}

#[test]
fn what_is_reduced_is_made_once_however_late_a_rank_comes() {
    let cache = cache(SPINS);
    let job = Numbers::new(2, |_| ());
    let [early, late] = [0, 1].map(|seq| Call::new(0, seq, ResultRetention::All));
    for call in [&early, &late, &early, &late] {
        assert!(are_numbers(&call.get(&job, &cache).0));
    }
    assert_eq!(job.begun.load(Ordering::SeqCst), 2);
}

#[test]
fn where_one_panics_others_start_from_scratch() {
    let call = Call::new(0, 0, ResultRetention::Latest);
    let cache = cache(SLEEPS);
    // The first task is taken while the second one is running, and panics when that is done.
    let both = Barrier::new(2);
    let first = AtomicBool::new(true);
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
    let get = || call.get(&job, &cache).0;
    let ranks = thread::scope(|scope| {
        [scope.spawn(get), scope.spawn(get)].map(thread::ScopedJoinHandle::join)
    });
    let made: Vec<_> = ranks.into_iter().filter_map(Result::ok).collect();
    assert_eq!(made.len(), 1, "the other has panicked");
    assert!(are_numbers(&made[0]));
    assert_eq!(job.begun.load(Ordering::SeqCst), 2);
}

/// However late a rank is with a task, no other rank builds the result for itself: that would take
/// memory and work n times when the machine is busiest.
#[test]
fn invariant_2_no_rank_builds_alone_what_another_is_late_with() {
    let call = Call::new(0, 0, ResultRetention::Latest);
    let cache = cache(SLEEPS);
    let (tell, taken) = mpsc::channel();
    let (go, told) = mpsc::channel::<()>();
    let is_first = AtomicBool::new(true);
    let told = Mutex::new(told);
    let job = Numbers::new(2, |_| {
        if is_first.swap(false, Ordering::SeqCst) {
            tell.send(()).unwrap();
            // Longer than any patience that is worth its memory; however long, the assertions hold.
            let _ = told.lock().recv_timeout(Duration::from_millis(500));
        }
    });
    let get = || call.get(&job, &cache);
    thread::scope(|scope| {
        let late = scope.spawn(get);
        taken.recv().unwrap();
        let (made, waited) = get();
        drop(go);
        let (late, _) = late.join().unwrap();
        assert!(are_numbers(&made) && waited > Duration::ZERO);
        assert_eq!(numbers(&made).as_ptr(), numbers(&late).as_ptr());
        assert_eq!(job.begun.load(Ordering::SeqCst), 1);
    });
}
