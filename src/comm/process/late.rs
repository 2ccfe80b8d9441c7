//! [`Late`]: receive buffer of a payload whose destination is not known when its header arrives.
//!
//! A payload can be received directly into the result of a collective, without a later copy, if the receiving rank
//! has called the collective. For an all-to-all, for example, only that rank knows the layout of the result. Even
//! ranks in step call at slightly different times. If the receiving rank has not called yet, the payload therefore
//! stays with the transport for at most the time that copying it would take, and for at most 2 ms. After that it
//! is received into a separate buffer.

use std::any::Any;
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::comm::transport::RecvBuffer;

/// Assumed copy bandwidth in bytes per nanosecond.
const COPIED: usize = 8;

/// Maximum wait. It is bounded because some ranks never provide a destination, and because messages behind this
/// one wait as well.
const LONGEST: Duration = Duration::from_millis(2);

/// Destination of the payloads of one header, as far as it is known.
pub(in crate::comm) enum Known {
    /// Buffers inside a result.
    Placed(Vec<Box<dyn RecvBuffer>>),
    /// The payloads must be received into separate buffers.
    Nowhere,
    /// The receiving rank has not called the collective, so the destination may still become known.
    NotYet,
}

/// Receive buffer of one payload with a destination that is chosen late.
pub(super) struct Late {
    /// The chosen buffer; `None` until this payload has taken it from `all`.
    landing: Option<Box<dyn RecvBuffer>>,
    index: usize,
    all: Arc<Mutex<All>>,
}

/// Shared state of the payloads of one header. Their destinations are chosen together.
struct All {
    ask: Box<dyn Fn() -> Known + Send>,
    /// Allocates separate buffers.
    spaces: Box<dyn Fn() -> Vec<Box<dyn RecvBuffer>> + Send>,
    until: Instant,
    /// The chosen buffers; each is `None` after its payload has taken it.
    landings: Option<Vec<Option<Box<dyn RecvBuffer>>>>,
}

impl All {
    /// Chooses the destination if it is known, if the deadline has passed or if `now` is set. Returns true if it
    /// is chosen.
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

/// Returns receive buffers for `count` payloads of `bytes` bytes in total. `ask` returns their destination, and
/// `spaces` allocates separate buffers if there is none in time.
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

/// Returns the buffer that was chosen for `landing`, or `landing` itself if it is not a [`Late`].
pub(super) fn settled(landing: Box<dyn RecvBuffer>) -> Box<dyn RecvBuffer> {
    if !(&*landing as &dyn Any).is::<Late>() {
        return landing;
    }
    let landing: Box<dyn Any> = landing;
    let mut late = landing.downcast::<Late>().expect("the type was checked");
    late.place();
    late.landing.expect("the buffer was chosen")
}

impl Late {
    fn place(&mut self) -> &mut Box<dyn RecvBuffer> {
        self.landing.get_or_insert_with(|| {
            let mut all = self.all.lock();
            all.settle(true);
            let landings = all.landings.as_mut().expect("the buffers were chosen");
            landings[self.index].take().expect("each payload takes its buffer once")
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

    /// Returns the buffers of two payloads that wait for `ask`, without a deadline if `wait` is set and not at all
    /// otherwise.
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
        assert!(
            landings.iter_mut().all(|landing| landing.is_settled()),
            "the destinations of all payloads of a header are chosen together"
        );
        assert_eq!(lengths(&mut landings), [3, 5]);
    }
}
