//! A rank that fails inside a sharded model: every other rank returns a typed error naming it.

use std::panic::{self, AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use burn::module::Module;
use burn::nn::{BatchNormConfig, Linear, LinearConfig, Relu};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Tensor};
use burn_dtensor::comm::{CommError, Launch, LaunchError, World, launch};
use burn_dtensor::fsdp::{ParamError, full_model_on, unshard};
use burn_dtensor::prelude::*;

use super::support::tensor;
use crate::own_process::own_process;

const CULPRIT: usize = 2;

#[derive(Module, Debug)]
struct Pair {
    first: Linear,
    second: Linear,
}

fn run(
    fault: impl Fn(&World, &Pair, Tensor<2>, &Device) -> Result<Tensor<2>, Error> + Sync,
) -> LaunchError {
    launch(
        Launch::threads(4).with_deadline(Duration::from_secs(60)),
        |world| {
            let device = world.device().clone().autodiff();
            let mesh = DeviceMesh::new(world, [4], ["shard"])?;
            let pair = Pair {
                first: LinearConfig::new(5, 5).init(&device),
                second: LinearConfig::new(5, 5).init(&device),
            };
            let pair = fully_shard(
                pair,
                &mesh,
                FullyShard::new().with_units(["first", "second"]),
            )?;
            let x = tensor(1, [2, 5], &device);
            let output = fault(world, &pair, x, &device)?;
            let _ = output.sum().backward();
            Ok(())
        },
    )
    .unwrap_err()
}

fn forward(pair: &Pair, x: Tensor<2>) -> Tensor<2> {
    let x = unit(&pair.first, x, |first, x| first.forward(x));
    unit(&pair.second, x, |second, x| second.forward(x))
}

/// Every survivor has a typed communication error that names the culprit.
fn assert_named(error: &LaunchError) {
    for report in &error.others {
        if report.rank == CULPRIT {
            continue;
        }
        let survivor = report
            .error
            .as_ref()
            .unwrap_or_else(|| panic!("rank {} has no error: {error}", report.rank));
        assert!(
            matches!(survivor, Error::Comm(_)),
            "rank {}: {survivor:?}",
            report.rank
        );
        assert!(
            survivor.to_string().contains(&format!("rank {CULPRIT}")),
            "rank {}: {survivor}",
            report.rank
        );
    }
}

#[test]
fn a_panic_in_forward() {
    let error = run(|world, pair, x, _| {
        let x = unit(&pair.first, x, |first, x| first.forward(x));
        if world.rank() == CULPRIT {
            panic!("out of luck");
        }
        Ok(unit(&pair.second, x, |second, x| second.forward(x)))
    });
    assert_eq!(error.rank, CULPRIT);
    assert!(error.to_string().contains("out of luck"), "{error}");
    assert_named(&error);
}

/// Returns the first line of the report.
fn first_line(error: &LaunchError) -> String {
    error
        .to_string()
        .lines()
        .next()
        .expect("a first line")
        .into()
}

#[test]
fn a_panic_in_a_unit_names_the_innermost() {
    let error = run(|world, pair, x, _| {
        Ok(unit(pair, x, |pair, x| {
            let x = unit(&pair.first, x, |first, x| first.forward(x));
            unit(&pair.second, x, |second, x| {
                assert!(world.rank() != CULPRIT, "out of luck");
                second.forward(x)
            })
        }))
    });
    let place = "(in the forward of unit `second` of Pair, sharded at tests/suite/fsdp/failure.rs:";
    let line = first_line(&error);
    assert!(
        line.starts_with(&format!(
            "launch failed at rank 2: rank 2 panicked: out of luck {place}"
        )),
        "{line}"
    );
    assert_eq!(
        error.to_string().matches("in the forward").count(),
        1,
        "{error}"
    );
    assert_named(&error);
    for report in error.others {
        let Some(Error::Comm(CommError::RankPanicked { message, .. })) = report.error else {
            continue;
        };
        assert!(
            message.starts_with(&format!("out of luck {place}")),
            "the other ranks know it too: {message}"
        );
    }
}

/// The program does not say where the forward of such a unit ends.
#[test]
fn a_panic_in_a_unit_that_a_read_opened() {
    let error = run(|world, pair, x, _| {
        Ok(unit(pair, x, |pair, x| {
            let x = pair.first.forward(x);
            assert!(world.rank() != CULPRIT, "out of luck");
            pair.second.forward(x)
        }))
    });
    let line = first_line(&error);
    assert!(
        line.contains("out of luck (in or after the forward of unit `first` of Pair, "),
        "{line}"
    );
}

/// A panic that the program catches says nothing about a later one, even if both have the same
/// text.
#[test]
fn a_caught_panic_is_forgotten() {
    for (second, place) in [
        (None, None),
        (Some("later"), None),
        (Some("caught"), Some("`second`")),
    ] {
        let error = run(|world, pair, x, _| {
            let caught = catch_unwind(AssertUnwindSafe(|| {
                unit(&pair.first, x.clone(), |first, x| {
                    assert!(world.rank() != CULPRIT, "caught");
                    first.forward(x)
                })
            }));
            let x = caught.unwrap_or(x);
            let Some(text) = second else {
                return Err(Error::other("no panic"));
            };
            assert!(place.is_some() || world.rank() != CULPRIT, "{text}");
            Ok(unit(&pair.second, x, |second, x| {
                assert!(world.rank() != CULPRIT, "{text}");
                second.forward(x)
            }))
        });
        let line = first_line(&error);
        match place {
            Some(unit) => assert!(
                line.contains(&format!("caught (in the forward of unit {unit} of Pair")),
                "{line}"
            ),
            None => assert!(!line.contains("in the forward"), "{line}"),
        }
    }
}

/// The text is burn's. With one rank there is one report.
#[test]
fn another_dtype_under_mixed_precision_says_what_to_do() {
    let error = launch(Launch::threads(1), |world| {
        let device = world.device().clone().autodiff();
        let mesh = DeviceMesh::new(world, [1], ["shard"])?;
        let bf16 = MixedPrecisionPolicy::new().with_param_dtype(DType::BF16);
        let layer = LinearConfig::new(5, 5).init(&device);
        let layer = fully_shard(layer, &mesh, FullyShard::new().with_mixed_precision(bf16))?;
        let _ = unit(&layer, tensor(1, [2, 5], &device), |layer, x| {
            let table = Tensor::<2>::ones([2, 5], &device);
            layer.forward(x) + table
        });
        Ok(())
    });
    // burn's text may have several lines.
    let text = error.unwrap_err().to_string();
    let says = [
        "dtype mismatch",
        "(in the forward of unit `root` of Linear, sharded at ",
        "which computes in bf16.",
        "`x.dtype()`",
    ];
    assert!(says.iter().all(|part| text.contains(part)), "{text}");
}

#[test]
fn an_inner_unit_that_returns_another_dtype_is_named() {
    let error = launch(Launch::threads(1), |world| {
        let device = world.device().clone().autodiff();
        let mesh = DeviceMesh::new(world, [1], ["shard"])?;
        let bf16 = MixedPrecisionPolicy::new()
            .with_param_dtype(DType::BF16)
            .with_output_dtype(DType::F32);
        let config = FullyShard::new()
            .with_units(["first"])
            .with_mixed_precision(bf16);
        let layer = || LinearConfig::new(5, 5).init(&device);
        let pair = fully_shard(
            Pair {
                first: layer(),
                second: layer(),
            },
            &mesh,
            config,
        )?;
        let _ = unit(&pair, tensor(1, [2, 5], &device), |pair, x| {
            pair.second
                .forward(unit(&pair.first, x, |first, x| first.forward(x)))
        });
        Ok(())
    });
    let text = error.unwrap_err().to_string();
    let says = [
        "dtype mismatch",
        "(in the forward of unit `root` of Pair, sharded at ",
        "which computes in bf16. Unit `first` inside it returns f32: set `with_output_dtype` for the outermost unit only",
    ];
    assert!(says.iter().all(|part| text.contains(part)), "{text}");
    assert!(!text.contains("`x.dtype()`"), "{text}");
}

/// Burn's own operations, between a unit's nodes in the graph.
#[test]
fn a_panic_in_backward_names_the_unit() {
    // A block whose module has no parameters is no scope of a unit, so nothing but the graph knows
    // of the unit.
    let error = run(|world, pair, x, _| {
        let (culprit, runs) = (world.rank() == CULPRIT, Arc::new(AtomicUsize::new(0)));
        Ok(unit(pair, x, |pair, x| {
            let x = unit(&pair.first, x, |first, x| first.forward(x));
            unit(&pair.second, x, |second, x| {
                checkpoint_activations(&Relu::new(), second.forward(x), move |relu, x| {
                    assert!(
                        !culprit || runs.fetch_add(1, Ordering::Relaxed) == 0,
                        "out of luck"
                    );
                    relu.forward(x)
                })
            })
        }))
    });
    let line = first_line(&error);
    assert!(
        line.contains(
            "panicked: out of luck (in the backward of unit `second` of Pair, sharded at "
        ),
        "{line}"
    );
    assert_named(&error);
}

#[test]
fn a_panic_in_a_recomputation_names_the_unit() {
    let error = run(|world, pair, x, _| {
        let (culprit, runs) = (world.rank() == CULPRIT, Arc::new(AtomicUsize::new(0)));
        let x = unit(&pair.first, x, |first, x| first.forward(x));
        Ok(checkpoint_activations(&pair.second, x, move |second, x| {
            assert!(
                !culprit || runs.fetch_add(1, Ordering::Relaxed) == 0,
                "out of luck"
            );
            second.forward(x)
        }))
    });
    let line = first_line(&error);
    assert!(
        line.contains("panicked: out of luck (in the recomputation of unit `second` of Pair, "),
        "{line}"
    );
}

/// Ranks that end because of another rank's panic do not panic themselves, in forward and in
/// backward.
#[test]
fn only_the_rank_at_fault_prints() {
    static PANICKED: Mutex<Vec<String>> = Mutex::new(Vec::new());
    own_process("fsdp::failure::only_the_rank_at_fault_prints", || {
        panic::set_hook(Box::new(|_| {
            PANICKED
                .lock()
                .unwrap()
                .push(thread::current().name().unwrap_or_default().into());
        }));
        for in_backward in [false, true] {
            let error = run(|world, pair, x, _| {
                let (culprit, runs) = (world.rank() == CULPRIT, Arc::new(AtomicUsize::new(0)));
                let x = unit(&pair.first, x, |first, x| first.forward(x));
                Ok(checkpoint_activations(&pair.second, x, move |second, x| {
                    let is_again = runs.fetch_add(1, Ordering::Relaxed) > 0;
                    assert!(!culprit || is_again != in_backward, "out of luck");
                    second.forward(x)
                }))
            });
            assert_named(&error);
            // Not locked while it is compared: the hook locks it too.
            let panicked = std::mem::take(&mut *PANICKED.lock().unwrap());
            assert_eq!(panicked, ["rank 2"], "{error}");
        }
        let _ = panic::take_hook();
    });
}

#[test]
fn an_early_return_in_forward() {
    let error = run(|world, pair, x, device| match world.rank() {
        CULPRIT => Ok(tensor::<2>(9, [1, 1], device).require_grad()),
        _ => Ok(forward(pair, x)),
    });
    assert_named(&error);
    assert!(
        error.others.iter().any(|report| matches!(
            report.error,
            Some(Error::Comm(CommError::RankReturned { .. }))
        )) || matches!(error.cause, Error::Comm(CommError::RankReturned { .. }))
    );
}

#[test]
fn an_error_of_the_program() {
    let error = run(|world, pair, x, _| match world.rank() {
        CULPRIT => Err(Error::other("no more data")),
        _ => Ok(forward(pair, x)),
    });
    assert_eq!(error.rank, CULPRIT);
    assert!(error.to_string().contains("no more data"), "{error}");
    assert_named(&error);
}

#[test]
fn units_in_another_order() {
    let error = run(|world, pair, x, _| {
        if world.rank() == CULPRIT {
            let x = unit(&pair.second, x, |second, x| second.forward(x));
            return Ok(unit(&pair.first, x, |first, x| first.forward(x)));
        }
        Ok(forward(pair, x))
    });
    let Error::Comm(CommError::Mismatch {
        rank,
        other,
        differs,
        ..
    }) = &error.cause
    else {
        panic!("{error}")
    };
    // If only two ranks have called, either may be the one that differs.
    let expected = match (*rank, *other) {
        (CULPRIT, _) => "label `second` vs `first`",
        (_, CULPRIT) => "label `first` vs `second`",
        _ => panic!("{error}"),
    };
    assert_eq!(differs, expected);
    assert_named(&error);
}

#[test]
fn another_order_in_backward() {
    // Forward gathers in one order on all ranks; the culprit's graph puts the units the other way.
    let error = run(|world, pair, x, _| {
        let a = unit(&pair.first, x.clone(), |first, x| first.forward(x));
        if world.rank() == CULPRIT {
            let b = unit(&pair.second, x, |second, x| second.forward(x));
            Ok(a.tanh().tanh() + b)
        } else {
            let b = unit(&pair.second, a, |second, x| second.forward(x));
            Ok(b)
        }
    });
    assert!(
        matches!(&error.cause, Error::Comm(CommError::Mismatch { .. })),
        "{error}"
    );
}

#[test]
fn a_unit_left_out_of_backward() {
    let error = run(|world, pair, x, _| {
        let a = unit(&pair.first, x.clone(), |first, x| first.forward(x));
        let b = unit(&pair.second, a.clone(), |second, x| second.forward(x));
        Ok(if world.rank() == CULPRIT { a } else { b })
    });
    assert_named(&error);
    let names_it = |error: &Error| match error {
        Error::Comm(CommError::Mismatch { rank, other, .. }) => [*rank, *other].contains(&CULPRIT),
        Error::Comm(CommError::RankReturned { rank, .. }) => *rank == CULPRIT,
        _ => false,
    };
    let survivors = error.others.iter().filter(|report| report.rank != CULPRIT);
    let told: Vec<_> = [&error.cause]
        .into_iter()
        .chain(survivors.filter_map(|report| report.error.as_ref()))
        .collect();
    assert!(
        told.len() > 2 && told.into_iter().all(names_it),
        "{error:?}"
    );
}

#[test]
fn a_panic_in_backward() {
    let error = run(|world, pair, x, _| {
        let scaled = x.require_grad() * 2.0;
        if world.rank() == CULPRIT {
            // burn refuses to run backward over a tape twice.
            let _ = scaled.clone().sum().backward();
        }
        Ok(forward(pair, scaled))
    });
    assert_eq!(error.rank, CULPRIT);
    assert!(
        error.to_string().contains("already been consumed"),
        "{error}"
    );
    assert_named(&error);
}

#[test]
fn a_parameter_of_another_shape() {
    let error = launch(Launch::threads(4), |world| {
        let device = world.device().clone().autodiff();
        let mesh = DeviceMesh::new(world, [4], ["shard"])?;
        let width = if world.rank() == CULPRIT { 6 } else { 5 };
        let linear = LinearConfig::new(width, 4).init(&device);
        fully_shard(linear, &mesh, FullyShard::new()).map(|_| ())
    })
    .unwrap_err();
    let Error::Param(ParamError::LayoutsDiffer {
        param,
        other_rank: CULPRIT,
        ..
    }) = &error.cause
    else {
        panic!("{error}")
    };
    assert_eq!(param, "weight");
    let others = error.others.iter().map(|report| {
        let own = report.error.as_ref();
        own.unwrap_or_else(|| panic!("rank {} has no error", report.rank))
    });
    let errors: Vec<_> = others.chain([&error.cause]).collect();
    assert_eq!(errors.len(), 4);
    for own in errors {
        let text = own.to_string();
        assert!(
            text.contains("rank 0 has `weight` [5, 4] f32")
                && text.contains("rank 2 has `weight` [6, 4] f32"),
            "{text}"
        );
    }
}

/// Returns what `call` returns to rank 0 of two, where rank 1 leaves after `set_up`.
#[expect(clippy::result_large_err, reason = "made once per test")]
fn left_alone<T>(
    set_up: impl Fn(&World) -> Result<T> + Sync,
    call: impl Fn(T) -> Result<()> + Sync,
) -> Result<Result<()>, LaunchError> {
    let returned = launch(
        Launch::threads(2).with_deadline(Duration::from_secs(60)),
        |world| {
            let state = set_up(world)?;
            Ok((world.rank() == 0).then(|| call(state)))
        },
    );
    returned.map(|mut ranks| ranks.swap_remove(0).1.expect("rank 0 has called it"))
}

/// Asserts that a function has returned the error that its documentation promises, and has not
/// unwound.
fn assert_returns(name: &str, returned: Result<Result<()>, LaunchError>) {
    match returned {
        Ok(Err(Error::Comm(CommError::RankReturned { rank: 1, .. }))) => {}
        Ok(other) => panic!("`{name}` returns {other:?}"),
        Err(error) => panic!("`{name}` unwinds: {error}"),
    }
}

type Call = fn(Linear) -> Result<()>;

#[test]
fn what_documents_an_error_returns_that_of_a_rank_that_left() {
    let sharded = |world: &World| {
        let mesh = DeviceMesh::new(world, [2], ["shard"])?;
        fully_shard(
            LinearConfig::new(4, 4).init(world.device()),
            &mesh,
            FullyShard::new(),
        )
    };
    let calls: [(&str, Call); 7] = [
        ("full_model", |layer| full_model(&layer).map(drop)),
        ("full_model_on, this rank", |layer| {
            full_model_on(&layer, 0).map(drop)
        }),
        ("full_model_on, another", |layer| {
            full_model_on(&layer, 1).map(drop)
        }),
        ("full_model, of what is being gathered", |layer| {
            let _under_way = unshard(&layer)?;
            full_model(&layer).map(drop)
        }),
        ("unshard", |layer| unshard(&layer)?.wait()),
        ("clip_grad_norm", |layer| {
            clip_grad_norm(&layer, &mut GradientsParams::new(), 1.0, NormType::L2).map(drop)
        }),
        ("unscale", |layer| {
            GradScaler::new()
                .unscale(&layer, &mut GradientsParams::new())
                .map(drop)
        }),
    ];
    for (name, call) in calls {
        assert_returns(name, left_alone(sharded, call));
    }
}

#[test]
fn full_model_returns_an_error_of_the_tensor_parallel_ranks() {
    let parallel = |world: &World| {
        let mesh = DeviceMesh::new(world, [1, 2], ["shard", "tp"])?;
        let layer = LinearConfig::new(4, 4).init(world.device());
        let layer = parallelize(
            layer,
            &mesh.slice("tp")?,
            Plan::new().with_style("", Style::colwise()),
        )?;
        fully_shard(layer, &mesh.slice("shard")?, FullyShard::new())
    };
    assert_returns(
        "full_model",
        left_alone(parallel, |layer: Linear| full_model(&layer).map(drop)),
    );
    assert_returns(
        "full_model_on",
        left_alone(parallel, |layer: Linear| full_model_on(&layer, 0).map(drop)),
    );
}

/// A sharded parameter is gathered before it is parallelized.
#[test]
fn parallelize_returns_an_error_of_the_ranks_that_hold_shards() {
    let sharded = |world: &World| {
        let mesh = DeviceMesh::new(world, [2, 1], ["shard", "tp"])?;
        let layer = LinearConfig::new(4, 4).init(world.device());
        Ok((
            fully_shard(layer, &mesh.slice("shard")?, FullyShard::new())?,
            mesh,
        ))
    };
    let returned = left_alone(sharded, |(layer, mesh): (Linear, DeviceMesh)| {
        parallelize(
            layer,
            &mesh.slice("tp")?,
            Plan::new().with_style("", Style::colwise()),
        )
        .map(drop)
    });
    assert_returns("parallelize", returned);
}

#[test]
fn sync_buffers_returns_an_error_of_a_model_that_has_buffers() {
    for buffers in [BufferSync::FirstRank, BufferSync::Average] {
        let norm = |world: &World| {
            let mesh = DeviceMesh::new(world, [2], ["shard"])?;
            fully_shard(
                BatchNormConfig::new(4).init(world.device()),
                &mesh,
                FullyShard::new().with_buffer_sync(buffers),
            )
        };
        assert_returns("sync_buffers", left_alone(norm, |norm| sync_buffers(&norm)));
        assert_returns(
            "full_model",
            left_alone(norm, |norm| full_model(&norm).map(drop)),
        );
    }
}

/// The failure of a backward that the program has caught does not explain what panics later.
#[test]
fn a_panic_after_a_backward_that_failed_and_was_caught_has_no_place_in_it() {
    let error = run(|world, pair, x, _| {
        let output = forward(pair, x);
        if world.rank() == CULPRIT {
            return Err(Error::other("this rank has enough"));
        }
        let caught = Error::catch(|| Ok(output.sum().backward()));
        assert!(caught.is_err(), "one rank does not take part");
        panic!("later")
    });
    for report in error.others.iter().filter(|report| report.rank != CULPRIT) {
        let own = report.error.as_ref().expect("it has panicked").to_string();
        assert!(own.contains("later") && !own.contains("backward"), "{own}");
    }
}
