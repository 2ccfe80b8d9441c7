//! How ranks end: every end reaches the other ranks at once, and the report keeps what the rank
//! said.

use std::panic::{AssertUnwindSafe, catch_unwind, panic_any};
use std::thread;
use std::time::Duration;

use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use burn_dtensor::comm::{CommError, Launch, World, launch};
use burn_dtensor::fsdp::{FullyShard, fully_shard};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::{Error, Result};

const FAR: Duration = Duration::from_secs(3600);

fn panicked(error: &Error, text: &str) -> bool {
    matches!(error, Error::Comm(CommError::RankPanicked { rank: 1, message, .. }) if message == text)
}

/// A panic payload that panics again when it is dropped.
struct Explosive;

impl Drop for Explosive {
    fn drop(&mut self) {
        panic_any(Self);
    }
}

#[test]
fn a_panic_payload_that_panics_when_dropped_reaches_those_who_wait() {
    let error = launch(
        Launch::threads(2).with_deadline(FAR),
        |world| -> Result<()> {
            if world.rank() == 1 {
                panic_any(Explosive);
            }
            world.barrier("step")
        },
    )
    .unwrap_err();
    assert!(panicked(&error.cause, "(no message)"), "{error}");
}

#[test]
fn the_report_keeps_what_the_rank_at_fault_returned() {
    let error = launch(
        Launch::threads(2).with_deadline(FAR),
        |world| -> Result<()> {
            match world.rank() {
                1 => {
                    let first = world.barrier("other").unwrap_err();
                    Err(Error::other(format!("disk full while handling: {first}")))
                }
                _ => Ok(world.barrier("step")?),
            }
        },
    )
    .unwrap_err();
    let Error::Comm(CommError::Mismatch { rank, .. }) = &error.cause else {
        panic!("{error}")
    };
    assert_eq!(*rank, error.rank);
    // Whoever came second is at fault, and the other's report is among the others.
    let own = error.own.iter().chain(
        error
            .others
            .iter()
            .filter_map(|report| report.error.as_ref()),
    );
    assert_eq!(
        own.filter(|error| error.to_string().starts_with("disk full"))
            .count(),
        1,
        "{error:?}"
    );
    assert!(
        error.to_string().contains("disk full while handling: "),
        "{error}"
    );
}

#[test]
fn the_report_keeps_the_panic_that_a_collective_in_a_drop_came_before() {
    struct Farewell<'a>(&'a World);
    impl Drop for Farewell<'_> {
        fn drop(&mut self) {
            // Unwinding: the others are elsewhere, so this fails.
            assert!(self.0.barrier("farewell").is_err());
        }
    }
    let error = launch(
        Launch::threads(3).with_deadline(FAR),
        |world| -> Result<()> {
            if world.rank() == 1 {
                let _farewell = Farewell(world);
                panic!("the real reason");
            }
            world.barrier("step")
        },
    )
    .unwrap_err();
    assert!(
        matches!(error.cause, Error::Comm(CommError::Mismatch { .. })),
        "{error}"
    );
    assert!(
        error
            .to_string()
            .contains("rank 1 panicked: the real reason"),
        "{error}"
    );
}

#[test]
fn an_end_that_is_the_cause_is_told_once() {
    let error = launch(
        Launch::threads(3).with_deadline(FAR),
        |world| -> Result<()> {
            let label = if world.rank() == 1 { "other" } else { "step" };
            world.barrier(label)
        },
    )
    .unwrap_err();
    assert!(error.own.is_none(), "{error:?}");
}

/// The text of the panic that `body` ends with, which the panic hook has printed.
fn printed<T>(body: impl FnOnce() -> T) -> String {
    let payload = catch_unwind(AssertUnwindSafe(body))
        .err()
        .expect("it fails");
    *payload.downcast::<String>().expect("a panic with a text")
}

#[test]
fn an_error_that_unwinds_after_the_launch_is_a_panic_with_its_text() {
    let models = launch(Launch::threads(2), |world| -> Result<Linear> {
        let mesh = DeviceMesh::new(world, [2], ["shard"])?;
        fully_shard(
            LinearConfig::new(4, 4).init(world.device()),
            &mesh,
            FullyShard::new(),
        )
    })
    .unwrap();
    let told = printed(|| {
        models[0]
            .1
            .forward(Tensor::<2>::ones([1, 4], &Device::flex()))
    });
    assert!(
        told.contains("rank 1 has returned, but all_gather"),
        "{told}"
    );
}

#[test]
fn an_error_that_unwinds_on_a_thread_of_a_rank_can_be_read_where_it_is_joined() {
    launch(Launch::threads(1), |_| -> Result<()> {
        let payload = thread::spawn(|| Error::other("no more data").unwind())
            .join()
            .unwrap_err();
        assert_eq!(
            *payload.downcast::<String>().expect("a panic with a text"),
            "no more data"
        );
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_rank_may_have_a_stack_of_its_own_size() {
    /// Each level takes more than 1 KiB of stack.
    fn dive(levels: usize) -> usize {
        let frame = std::hint::black_box([levels as u8; 1024]);
        if levels == 0 {
            0
        } else {
            usize::from(frame[1023] == levels as u8) + dive(levels - 1)
        }
    }
    // 16 Ki levels of 1 KiB are more than the 8 MiB that a rank has by default.
    let depths = launch(Launch::threads(2).with_stack_size(64 << 20), |_| {
        Ok(dive(16 << 10))
    });
    assert_eq!(depths.unwrap(), [(0, 16 << 10), (1, 16 << 10)]);
}
