//! [`Late`]: where a payload lands whose place its rank may yet say.
//!
//! What others send for a result lands in it, and need not be copied, if the rank here has called: what it gets of an
//! all-to-all only it knows. Among ranks in step one is always a little later than the other. So what is sent to one that has
//! not called waits for it where it is, for as long as it would take to copy it afterwards, and 2 ms at most: then it lands in
//! memory of its own.

use std::any::Any;
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::comm::transport::RecvBuffer;

/// Bytes that are copied in a nanosecond.
const COPIED: usize = 8;

/// The longest wait: some ranks never say, and what comes behind waits, too.
const LONGEST: Duration = Duration::from_millis(2);

/// What is known of where the payloads of one header land.
pub(in crate::comm) enum Known {
    /// There.
    Placed(Vec<Box<dyn RecvBuffer>>),
    /// In memory of their own.
    Nowhere,
    /// The rank has not called.
    NotYet,
}

/// Where one payload lands.
pub(super) struct Late {
    /// Once it is settled.
    landing: Option<Box<dyn RecvBuffer>>,
    index: usize,
    all: Arc<Mutex<All>>,
}

/// The payloads of one header.
struct All {
    ask: Box<dyn Fn() -> Known + Send>,
    /// Makes memory of their own.
    spaces: Box<dyn Fn() -> Vec<Box<dyn RecvBuffer>> + Send>,
    until: Instant,
    /// Those that nobody has taken, once they are settled.
    landings: Option<Vec<Option<Box<dyn RecvBuffer>>>>,
}

impl All {
    /// Whether their place is known, or nobody waits for it any more.
    fn settle(&mut self, now: bool) -> bool {
        if self.landings.is_none() {
            let landings = match (self.ask)() {
                Known::Placed(landings) => landings,
                Known::NotYet if !now && Instant::now() < self.until => return false,
                Known::Nowhere | Known::NotYet => (self.spaces)(),
            };
            self.landings = Some(landings.into_iter().map(Some).collect());
        }
        true
    }
}

/// Landings for so many payloads of so many `bytes`, of which `ask` says where, and `spaces` has memory for them.
pub(super) fn landings(
    count: usize,
    bytes: usize,
    ask: impl Fn() -> Known + Send + 'static,
    spaces: impl Fn() -> Vec<Box<dyn RecvBuffer>> + Send + 'static,
) -> Vec<Box<dyn RecvBuffer>> {
    let until = Instant::now() + LONGEST.min(Duration::from_nanos((bytes / COPIED) as u64));
    landings_until(until, count, ask, spaces)
}

fn landings_until(
    until: Instant,
    count: usize,
    ask: impl Fn() -> Known + Send + 'static,
    spaces: impl Fn() -> Vec<Box<dyn RecvBuffer>> + Send + 'static,
) -> Vec<Box<dyn RecvBuffer>> {
    let all = All { ask: Box::new(ask), spaces: Box::new(spaces), until, landings: None };
    let all = Arc::new(Mutex::new(all));
    (0..count)
        .map(|index| -> Box<dyn RecvBuffer> { Box::new(Late { landing: None, index, all: all.clone() }) })
        .collect()
}

/// What `landing` is in the end.
pub(super) fn settled(landing: Box<dyn RecvBuffer>) -> Box<dyn RecvBuffer> {
    if !(&*landing as &dyn Any).is::<Late>() {
        return landing;
    }
    let landing: Box<dyn Any> = landing;
    let mut late = landing.downcast::<Late>().expect("it is one");
    late.place();
    late.landing.expect("it has a place now")
}

impl Late {
    fn place(&mut self) -> &mut Box<dyn RecvBuffer> {
        self.landing.get_or_insert_with(|| {
            let mut all = self.all.lock();
            all.settle(true);
            let landings = all.landings.as_mut().expect("they are settled");
            landings[self.index].take().expect("each is taken once")
        })
    }
}

impl RecvBuffer for Late {
    fn is_settled(&mut self) -> bool {
        self.landing.is_some() || self.all.lock().settle(false)
    }

    fn space(&mut self) -> &mut [MaybeUninit<u8>] {
        self.place().space()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::super::payload::waste;
    use super::*;

    /// Landings that wait until somebody says where they are, or not.
    fn late(wait: bool, ask: impl Fn() -> Known + Send + 'static) -> Vec<Box<dyn RecvBuffer>> {
        let until = Instant::now() + if wait { Duration::from_secs(600) } else { Duration::ZERO };
        landings_until(until, 2, ask, || waste(&[3, 5]))
    }

    fn lengths(landings: &mut [Box<dyn RecvBuffer>]) -> Vec<usize> {
        landings.iter_mut().map(|landing| landing.space().len()).collect()
    }

    #[test]
    fn a_payload_waits_for_its_place() {
        let called = Arc::new(AtomicBool::new(false));
        let known = called.clone();
        let placed = move || if known.load(Ordering::SeqCst) { Known::Placed(waste(&[30, 50])) } else { Known::NotYet };
        let mut landings = late(true, placed);
        assert!(landings.iter_mut().all(|landing| !landing.is_settled()));
        called.store(true, Ordering::SeqCst);
        assert!(landings.iter_mut().all(|landing| landing.is_settled()));
        assert_eq!(lengths(&mut landings), [30, 50]);
    }

    #[test]
    fn one_that_has_no_place_or_has_waited_lands_elsewhere() {
        let asks: [fn() -> Known; 2] = [|| Known::Nowhere, || Known::NotYet];
        for (ask, wait) in asks.into_iter().zip([true, false]) {
            let mut landings = late(wait, ask);
            assert!(landings.iter_mut().all(|landing| landing.is_settled()));
            assert_eq!(lengths(&mut landings), [3, 5]);
        }
    }

    #[test]
    fn one_that_is_asked_for_its_space_waits_no_longer() {
        let mut landings = late(true, || Known::NotYet);
        assert_eq!(landings[1].space().len(), 5);
        assert!(landings.iter_mut().all(|landing| landing.is_settled()), "all of a header land alike");
        assert_eq!(lengths(&mut landings), [3, 5]);
    }
}
