//! Failures: every other rank gets a typed error that names the culprit, at once.
//!
//! The deadline is far longer than the suite's time limit for one test, so only prompt waking
//! passes.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use burn::nn::{Linear, LinearConfig};
use burn::tensor::{DType, Shape, Tensor};
use burn_dtensor::Error;
use burn_dtensor::comm::{
    CommError, Communicator, Launch, LaunchError, Op, RankReport, ReduceOp, ShardedTensor,
    TensorMeta, World, launch,
};
use burn_dtensor::fsdp::{FullyShard, fully_shard, unit};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::placement::ShardSizes;

/// Ends what would hang; nobody waits for it.
const FAR: Duration = Duration::from_secs(60);

/// Runs 4 ranks in which rank 2 does `wrong` while the others gather; returns what they ended with.
fn provoke(wrong: impl Fn(&World, &Communicator) -> Result<(), Error> + Sync) -> LaunchError {
    launch(Launch::threads(4).with_deadline(FAR), |world| {
        let comm = world.all();
        comm.barrier("start".into()).wait()?;
        if world.rank() == 2 {
            wrong(world, &comm)
        } else {
            gather(world, &comm, "unit", DType::F32, 9)
        }
    })
    .unwrap_err()
}

fn gather(
    world: &World,
    comm: &Communicator,
    label: &str,
    dtype: DType,
    width: usize,
) -> Result<(), Error> {
    let tensor = Tensor::<2>::ones([2, width], world.device())
        .cast(dtype)
        .into_dispatch();
    comm.all_gather(
        label.into(),
        vec![ShardedTensor {
            tensor,
            dim: 0,
            sizes: ShardSizes::Chunked(8),
        }],
    )
    .wait()?;
    Ok(())
}

/// The error of every rank but 2.
fn of_the_others(error: &LaunchError) -> Vec<CommError> {
    let others = error.others.iter().filter(|report| report.rank != 2);
    let errors: Vec<_> = others
        .map(|report| match &report.error {
            Some(Error::Comm(error)) => error.clone(),
            other => panic!("rank {} ended with {other:?}", report.rank),
        })
        .collect();
    assert_eq!(errors.len(), 3);
    errors
}

#[test]
fn a_rank_panics() {
    let error = provoke(|_, _| panic!("boom"));
    assert_eq!(error.rank, 2);
    for error in of_the_others(&error) {
        let CommError::RankPanicked {
            rank: 2,
            message,
            during: Some(id),
        } = error
        else {
            panic!("{error}")
        };
        assert_eq!(
            (message.as_str(), id.op, id.seq, &*id.label),
            ("boom", Op::AllGather, 1, "unit")
        );
    }
    assert!(
        matches!(
            error.cause,
            Error::Comm(CommError::RankPanicked { rank: 2, .. })
        ),
        "{error}"
    );
}

#[test]
fn a_rank_returns_an_error() {
    let error = provoke(|_, _| Err(Error::other("no such file")));
    assert!(matches!(&error.cause, Error::Other(error) if error.to_string() == "no such file"));
    for error in of_the_others(&error) {
        assert!(
            matches!(error, CommError::RankFailed { rank: 2, ref message, .. } if message == "no such file"),
            "{error}"
        );
    }
}

#[test]
fn a_rank_unwinds_with_a_typed_error() {
    let error = provoke(|_, _| Error::other("in a backward step").unwind());
    assert!(
        matches!(&error.cause, Error::Other(error) if error.to_string() == "in a backward step")
    );
    for error in of_the_others(&error) {
        assert!(
            matches!(error, CommError::RankFailed { rank: 2, .. }),
            "{error}"
        );
    }
}

#[test]
fn a_rank_returns_early() {
    let error = provoke(|_, _| Ok(()));
    assert!(
        matches!(
            error.cause,
            Error::Comm(CommError::RankReturned { rank: 2, .. })
        ),
        "{error}"
    );
    for error in of_the_others(&error) {
        let CommError::RankReturned { rank: 2, during } = error else {
            panic!("{error}")
        };
        assert_eq!((during.op, during.seq), (Op::AllGather, 1));
    }
}

/// Rank 2 disagrees: all four ranks name ranks, operation, number and what differs.
fn disagree(differs: &str, wrong: impl Fn(&World, &Communicator) -> Result<(), Error> + Sync) {
    let error = provoke(wrong);
    let Error::Comm(cause) = &error.cause else {
        panic!("{error}")
    };
    let mut errors: Vec<_> = error
        .others
        .iter()
        .filter_map(|report| report.error.clone())
        .collect();
    assert_eq!(errors.len(), 3);
    errors.push(cause.clone().into());
    for error in errors {
        let Error::Comm(CommError::Mismatch {
            rank,
            other,
            during,
            differs: what,
        }) = &error
        else {
            panic!("{error}")
        };
        assert!(*rank == 2 || *other == 2, "{error}");
        assert_eq!(during.seq, 1);
        let mirrored = differs.split_once(" vs ").map(|(a, b)| {
            let (what, a) = a
                .rsplit_once(' ')
                .filter(|_| !a.ends_with(']'))
                .unwrap_or_else(|| a.split_at(a.find('[').unwrap() - 1));
            format!("{what} {b} vs {}", a.trim())
        });
        assert!(what == differs || Some(what) == mirrored.as_ref(), "{what}");
    }
}

#[test]
fn a_rank_calls_another_collective() {
    disagree("operation barrier vs all_gather", |_, comm| {
        Ok(comm.barrier("unit".into()).wait()?)
    });
}

#[test]
fn a_rank_gathers_another_shape() {
    disagree("tensor 0: shape [8, 8] vs [8, 9]", |world, comm| {
        gather(world, comm, "unit", DType::F32, 8)
    });
}

#[test]
fn a_rank_gathers_another_dtype() {
    disagree("tensor 0: dtype f64 vs f32", |world, comm| {
        gather(world, comm, "unit", DType::F64, 9)
    });
}

#[test]
fn a_rank_uses_another_label() {
    disagree("label `other` vs `unit`", |world, comm| {
        gather(world, comm, "other", DType::F32, 9)
    });
}

#[test]
fn a_rank_passes_a_shard_of_the_wrong_size() {
    let error = provoke(|world, comm| {
        let tensor = Tensor::<2>::ones([3, 9], world.device()).into_dispatch();
        comm.all_gather(
            "unit".into(),
            vec![ShardedTensor {
                tensor,
                dim: 0,
                sizes: ShardSizes::Chunked(8),
            }],
        )
        .wait()?;
        Ok(())
    });
    for error in of_the_others(&error) {
        let CommError::InvalidArgument {
            rank: 2, problem, ..
        } = &error
        else {
            panic!("{error}")
        };
        assert!(
            problem.contains("length 3 in dimension 0") && problem.contains("has 2"),
            "{error}"
        );
    }
}

#[test]
fn a_rank_passes_a_tracked_tensor() {
    let error = provoke(|world, comm| {
        let tensor = Tensor::<2>::ones([2, 9], &world.device().clone().autodiff()).into_dispatch();
        comm.all_reduce("unit".into(), vec![tensor], ReduceOp::Sum)
            .wait()?;
        Ok(())
    });
    for error in of_the_others(&error) {
        assert!(
            matches!(&error, CommError::InvalidArgument { rank: 2, problem, .. } if problem.contains("autodiff")),
            "{error}"
        );
    }
}

#[test]
fn a_rank_is_late() {
    let given_up = AtomicBool::new(false);
    let error = launch(
        Launch::threads(3).with_deadline(Duration::from_millis(100)),
        |world| {
            while world.rank() == 1 && !given_up.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(1));
            }
            let result = world.barrier("meet");
            given_up.store(true, Ordering::Relaxed);
            result
        },
    )
    .unwrap_err();
    assert_eq!(error.rank, 1);
    for error in std::iter::once(error.cause)
        .chain(error.others.into_iter().filter_map(|report| report.error))
    {
        let Error::Comm(CommError::DeadlineExceeded {
            missing, during, ..
        }) = &error
        else {
            panic!("{error}")
        };
        assert_eq!((missing.as_slice(), during.op), (&[1][..], Op::Barrier));
    }
}

#[test]
fn ranks_that_wait_for_each_other_are_told() {
    let error = launch(Launch::threads(4).with_deadline(FAR), |world| {
        let pairs = [[0, 1], [1, 2], [2, 3], [3, 0]];
        let of = |pair: [usize; 2]| world.group(&pair);
        // Every rank starts with the pair it shares with its right neighbour.
        of(pairs[world.rank()])?.barrier("right".into()).wait()?;
        of(pairs[(world.rank() + 3) % 4])?
            .barrier("left".into())
            .wait()?;
        Ok(())
    })
    .unwrap_err();
    let errors: Vec<_> = error
        .others
        .iter()
        .filter_map(|report| report.error.clone())
        .chain([error.cause.clone()])
        .collect();
    assert_eq!(errors.len(), 4);
    for error in errors {
        let Error::Comm(CommError::Deadlock { waits }) = &error else {
            panic!("{error}")
        };
        assert_eq!(waits.len(), 4);
        assert!(
            waits
                .iter()
                .all(|(rank, _, target)| *target == (rank + 1) % 4),
            "{error}"
        );
    }
}

#[test]
fn after_a_failure_every_group_is_closed() {
    launch(Launch::threads(4).with_deadline(FAR), |world| {
        let pair = world.group(&[world.rank() / 2 * 2, world.rank() / 2 * 2 + 1])?;
        let label = if world.rank() == 0 { "a" } else { "b" };
        let first = world.all().barrier(label.into()).wait().unwrap_err();
        assert!(matches!(first, CommError::Mismatch { .. }));
        let then = pair.barrier("later".into()).wait().unwrap_err();
        assert_eq!(first, then);
        Ok(())
    })
    .unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn the_report_says_what_every_rank_was_doing() {
    let mut doing = Vec::new();
    // No rank can see that another has begun to wait: give it ever more time until it has.
    for pause in [10, 100, 1000, 5000] {
        let error = launch(Launch::threads(3).with_deadline(FAR), |world| {
            let all = world.all();
            all.barrier("start".into()).wait()?;
            match world.rank() {
                0 => all.barrier("meet".into()).wait()?,
                // Dropped: rank 1 has taken part, and goes on to return.
                1 => drop(all.barrier("meet".into())),
                _ => {
                    std::thread::sleep(Duration::from_millis(pause));
                    panic!("boom");
                }
            }
            Ok(())
        })
        .unwrap_err();
        let text = error.to_string();
        assert!(
            text.starts_with("launch failed at rank 2: rank 2 panicked: boom\n  rank 0 was "),
            "{text}"
        );
        doing = error
            .others
            .into_iter()
            .map(|report| report.activity)
            .collect();
        if doing
            == [
                "waiting in barrier #1 `meet` on ranks [0, 1, 2] for rank 2",
                "finished",
            ]
        {
            return;
        }
    }
    panic!("{doing:?}");
}

/// What the only rank to call `wrong` is told: problem and remedy.
fn refused(wrong: impl Fn(&World, &Communicator) -> Result<(), CommError> + Sync) -> String {
    let error = provoke(|world, comm| Ok(wrong(world, comm)?));
    for error in of_the_others(&error) {
        assert!(
            matches!(error, CommError::InvalidArgument { rank: 2, .. }),
            "{error}"
        );
    }
    error.cause.to_string()
}

#[test]
fn arguments_are_checked_before_anyone_waits() {
    let matrix = |world: &World| Tensor::<2>::ones([2, 9], world.device()).into_dispatch();
    let meta = || {
        vec![TensorMeta {
            shape: Shape::from([2, 9]),
            dtype: DType::F32,
        }]
    };
    let shard = |world: &World, dim, len| ShardedTensor {
        tensor: matrix(world),
        dim,
        sizes: ShardSizes::Chunked(len),
    };

    let told = refused(|world, comm| {
        comm.all_gather("x".into(), vec![shard(world, 2, 8)])
            .wait()
            .map(drop)
    });
    assert!(
        told.contains(
            "rank 2: all_gather `x`: tensor 0 has 2 dimensions, so dimension 2 is out of range"
        ),
        "{told}"
    );
    let told = refused(|world, comm| {
        comm.reduce_scatter("x".into(), vec![shard(world, 0, 8)], ReduceOp::Sum)
            .wait()
            .map(drop)
    });
    assert!(
        told.contains("has length 2 in dimension 0, but its shard sizes add up to 8"),
        "{told}"
    );
    let uneven = |world: &World, dim, lengths: &[usize]| {
        vec![ShardedTensor {
            tensor: matrix(world),
            dim,
            sizes: ShardSizes::Uneven(lengths.into()),
        }]
    };
    let told = refused(|world, comm| {
        comm.all_gather("x".into(), uneven(world, 0, &[2, 2, 2]))
            .wait()
            .map(drop)
    });
    assert!(
        told.contains(
            "tensor 0 has 3 shard sizes [2, 2, 2] in a group of 4 ranks. Pass one shard size"
        ),
        "{told}"
    );
    let told = refused(|world, comm| {
        comm.all_gather("x".into(), uneven(world, 0, &[2, 2, 3, 1]))
            .wait()
            .map(drop)
    });
    assert!(
        told.contains("has length 2 in dimension 0, but shard size 2 of [2, 2, 3, 1] is 3"),
        "{told}"
    );
    let told = refused(|world, comm| {
        comm.reduce_scatter("x".into(), uneven(world, 1, &[2, 2, 3, 1]), ReduceOp::Sum)
            .wait()
            .map(drop)
    });
    assert!(
        told.contains("has length 9 in dimension 1, but its shard sizes add up to 8"),
        "{told}"
    );
    let told = refused(|_, comm| {
        let sizes = (1, ShardSizes::Uneven([4, 5].into()));
        comm.scatter("x".into(), None, meta(), vec![sizes], 0)
            .wait()
            .map(drop)
    });
    assert!(
        told.contains("has 2 shard sizes [4, 5] in a group of 4 ranks"),
        "{told}"
    );
    let told = refused(|world, comm| {
        comm.all_to_all("x".into(), shard(world, 0, 8), 1, ShardSizes::Chunked(8))
            .wait()
            .map(drop)
    });
    assert!(
        told.contains("has length 9 in dimension 1, but its shard sizes add up to 8"),
        "{told}"
    );
    let told = refused(|world, comm| {
        comm.all_to_all("x".into(), shard(world, 0, 8), 0, ShardSizes::Chunked(8))
            .wait()
            .map(drop)
    });
    assert!(
        told.contains("`to_dim` is 0, which is the sharded dimension already"),
        "{told}"
    );
    let told = refused(|_, comm| comm.broadcast("x".into(), None, meta(), 4).wait().map(drop));
    assert!(
        told.contains("root 4 is outside a group of 4 ranks"),
        "{told}"
    );
    let told = refused(|_, comm| comm.broadcast("x".into(), None, meta(), 2).wait().map(drop));
    assert!(told.contains("the root passes no tensors"), "{told}");
    let told = refused(|world, comm| {
        let wrong = vec![TensorMeta {
            shape: Shape::from([2, 8]),
            dtype: DType::F32,
        }];
        comm.broadcast("x".into(), Some(vec![matrix(world)]), wrong, 2)
            .wait()
            .map(drop)
    });
    assert!(
        told.contains("tensor 0 is [2, 9] f32, but `metas` describes [2, 8] f32"),
        "{told}"
    );
    let told = refused(|_, comm| {
        comm.scatter("x".into(), None, meta(), vec![], 0)
            .wait()
            .map(drop)
    });
    assert!(told.contains("1 tensors, but 0 `shardings`"), "{told}");
    let told = refused(|world, comm| {
        let flags = Tensor::<1>::ones([4], world.device())
            .greater_scalar(0.0)
            .into_dispatch();
        comm.all_reduce("x".into(), vec![flags], ReduceOp::Sum)
            .wait()
            .map(drop)
    });
    assert!(told.contains("bool, which has no Sum. Use Max"), "{told}");
}

#[test]
fn lists_of_parts_are_checked_before_anyone_waits() {
    let part = |world: &World| Some(Tensor::<1>::ones([2], world.device()).into_dispatch());
    let meta = |len: usize| {
        Some(TensorMeta {
            shape: Shape::from([len]),
            dtype: DType::F32,
        })
    };
    let told = refused(|world, comm| {
        comm.all_to_all_list("x".into(), vec![part(world); 3], vec![None; 4])
            .wait()
            .map(drop)
    });
    assert!(
        told.contains("3 parts and 4 `metas` in a group of 4 ranks. Pass one of each per rank"),
        "{told}"
    );
    let told = refused(|world, comm| {
        let mut parts = vec![None; 4];
        parts[2] = part(world);
        comm.all_to_all_list("x".into(), parts, vec![None, None, meta(3), None])
            .wait()
            .map(drop)
    });
    assert!(
        told.contains("this rank's tensor for itself is [2] f32, but `metas` describes [3] f32"),
        "{told}"
    );
    let told = refused(|world, comm| {
        let tracked = Tensor::<1>::ones([2], &world.device().clone().autodiff()).into_dispatch();
        comm.all_to_all_list(
            "x".into(),
            vec![None, Some(tracked), None, None],
            vec![None; 4],
        )
        .wait()
        .map(drop)
    });
    assert!(
        told.contains("tensor 1 belongs to an autodiff device"),
        "{told}"
    );
}

/// Every pair has an agreement of its own: the other ranks of the group have no part in it.
#[test]
fn a_tensor_that_its_addressee_does_not_expect_is_an_error_of_both() {
    for (given, taken, differs) in [
        (2, Some(3), "[2] f32 vs [3] f32"),
        (2, None, "[2] f32 vs none"),
    ] {
        let error = launch(Launch::threads(4).with_deadline(FAR), |world| {
            let (mut parts, mut metas) = (vec![None; 4], vec![None; 4]);
            match world.rank() {
                1 => parts[3] = Some(Tensor::<1>::ones([given], world.device()).into_dispatch()),
                3 => {
                    metas[1] = taken.map(|len| TensorMeta {
                        shape: Shape::from([len]),
                        dtype: DType::F32,
                    })
                }
                _ => {}
            }
            world
                .all()
                .all_to_all_list("unit".into(), parts, metas)
                .wait()?;
            Ok(())
        })
        .unwrap_err();
        let Error::Comm(CommError::Mismatch {
            rank,
            other,
            differs: what,
            ..
        }) = &error.cause
        else {
            panic!("{error}")
        };
        let (a, b) = differs.split_once(" vs ").unwrap();
        let says = |a, b| format!("tensor of group rank 1 for group rank 3 {a} vs {b}");
        assert!(
            [(1, 3, says(a, b)), (3, 1, says(b, a))].contains(&(*rank, *other, what.clone())),
            "{error}"
        );
    }
}

#[test]
fn ranks_that_name_different_roots_are_told() {
    let error = launch(Launch::threads(3).with_deadline(FAR), |world| {
        let root = world.rank().min(1);
        let tensors = (world.rank() == root).then(Vec::new);
        world
            .all()
            .broadcast("unit".into(), tensors, vec![], root)
            .wait()?;
        Ok(())
    })
    .unwrap_err();
    let Error::Comm(CommError::Mismatch { differs, .. }) = &error.cause else {
        panic!("{error}")
    };
    assert!(
        differs == "root 1 vs 0" || differs == "root 0 vs 1",
        "{error}"
    );
}

#[test]
fn one_panic_ends_128_ranks() {
    let error = launch(Launch::threads(128).with_deadline(FAR), |world| {
        // Each rank waits in a group of its own with rank 77, and none of them in one with another.
        if world.rank() == 77 {
            panic!("boom");
        }
        Ok(world
            .group(&[world.rank(), 77])?
            .barrier("meet".into())
            .wait()?)
    })
    .unwrap_err();
    assert_eq!((error.rank, error.others.len()), (77, 127));
    for report in error.others {
        let error = report.error.expect("nobody met rank 77");
        assert!(
            matches!(error, Error::Comm(CommError::RankPanicked { rank: 77, .. })),
            "{error}"
        );
    }
}

#[test]
fn ranks_with_the_same_outcome_share_a_line() {
    let word = CommError::RankFailed {
        rank: 0,
        message: "first".into(),
        during: None,
    };
    let report = |rank, activity: &str, error: Error| RankReport {
        rank,
        activity: activity.into(),
        error: Some(error),
        at: None,
    };
    let error = LaunchError {
        rank: 0,
        cause: Error::other("first"),
        at: None,
        own: None,
        others: vec![
            report(1, "waiting for rank 0", word.clone().into()),
            report(2, "computing", word.clone().into()),
            report(3, "waiting for rank 0", word.into()),
            report(4, "waiting for rank 0", Error::other("second")),
        ],
        last: Vec::new(),
        flight: None,
        is_reported_by_other_process: false,
    };
    let lines = [
        "launch failed at rank 0: first",
        "each of ranks [1, 3, 4] was waiting for rank 0",
        "rank 2 was computing",
        "each of ranks [1, 2, 3] ended with it",
        "rank 4 ended with: second",
    ];
    assert_eq!(error.to_string(), lines.join("\n  "));
    // What a `main` prints that returns it.
    assert_eq!(
        format!("{:?}", Error::from(error.clone())),
        lines.join("\n  ")
    );
    let elsewhere = Error::from(LaunchError {
        is_reported_by_other_process: true,
        ..error
    });
    assert_eq!(
        format!("{elsewhere:?}"),
        "launch failed at rank 0. Process 0 prints the report"
    );
}

/// Each rank has its own number: one line, not one for each.
#[test]
fn errors_that_differ_in_numbers_share_a_line() {
    let error = launch(Launch::threads(4), |world| -> Result<(), Error> {
        Err(Error::other(format!(
            "rank {0} has {0} rows of 12",
            world.rank()
        )))
    })
    .unwrap_err();
    let text = error.to_string();
    let ends: Vec<_> = text.lines().filter(|line| line.contains("ended")).collect();
    let others: Vec<_> = (0..4).filter(|rank| *rank != error.rank).collect();
    assert_eq!(
        ends,
        [format!(
            "  each of ranks {others:?} ended with the same error except for numbers"
        )],
        "{text}"
    );

    let report = |rank| RankReport {
        rank,
        activity: "computing".into(),
        error: Some(Error::other(format!("{rank} rows"))),
        at: None,
    };
    let others = [1, 2].map(report).to_vec();
    let text = LaunchError {
        cause: Error::other("first"),
        others,
        ..error
    }
    .to_string();
    assert!(
        text.contains("\n  each of ranks [1, 2], with other numbers, ended with: 1 rows"),
        "{text}"
    );
}

#[test]
fn a_launch_without_any_collective_still_reports_an_error() {
    let error = launch(Launch::threads(2), |world| match world.rank() {
        0 => Ok(()),
        _ => Err(Error::other("alone")),
    })
    .unwrap_err();
    assert_eq!((error.rank, error.others.len()), (1, 1));
    assert!(error.others[0].error.is_none());
}

/// A rank that skips a unit. The lines below the first depend on what the other rank was doing.
#[test]
fn the_readmes_sample_is_what_ranks_get() {
    let error = launch(Launch::threads(2).with_deadline(FAR), |world| {
        let mesh = DeviceMesh::new(world, [2], ["shard"])?;
        let layer = |_| LinearConfig::new(4, 4).init(world.device());
        let blocks: Vec<Linear> = (0..2).map(layer).collect();
        let blocks = fully_shard(blocks, &mesh, FullyShard::new().with_units(["*"]))?;
        let x = Tensor::<2>::ones([2, 4], world.device());
        let run = |x, block: &Linear| unit(block, x, |block, x| block.forward(x));
        blocks[world.rank()..].iter().fold(x, run);
        Ok(())
    });
    let text = error.unwrap_err().to_string();
    let cause = text.split("\n  ").next().expect("a first line");
    // The rank that arrives second reports the difference: rank 0 enters unit 0, and rank 1 unit 1.
    let swap = |letter| match letter {
        '0' => '1',
        '1' => '0',
        letter => letter,
    };
    let other: String = cause.chars().map(swap).collect();
    // The swap is of ranks and units, not of the number of the call.
    let other = other
        .replace("ranks [1, 0]", "ranks [0, 1]")
        .replace("#01", "#10");
    let (_, section) = include_str!("../../README.md")
        .split_once("\n## When ranks disagree\n")
        .expect("the section");
    let (_, sample) = section.split_once("\n```text\n").expect("a sample");
    let words = |text: &str| {
        text.split_whitespace()
            .map(String::from)
            .collect::<Vec<_>>()
    };
    assert!(
        [cause, &other]
            .iter()
            .any(|cause| words(sample).starts_with(&words(cause))),
        "{text}"
    );
}
