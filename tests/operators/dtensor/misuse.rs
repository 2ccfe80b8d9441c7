//! Every misuse is a typed error that names what is wrong and how to repair it.

use std::hash::{Hash, Hasher};
use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::tensor::{DType, Device, Distribution, Int, Shape, Tensor};
use burn_dtensor::comm::{CommError, Launch, launch};
use burn_dtensor::dtensor::ops::{EinsumRule, Operator, ShardingRule, Strategy, apply, loss};
use burn_dtensor::dtensor::{DTensor, DTensorError};
use burn_dtensor::mesh::{DeviceMesh, MeshError};
use burn_dtensor::placement::{Layout, PlacementError};
use burn_dtensor::testing::MeshTest;
use burn_dtensor::{Error, Result};

use super::{AVG, MAX, PRODUCT, R, S, SUM, error_of, on_mesh, ramp, unwound};

#[test]
fn every_misuse_is_a_typed_error_with_its_remedy() {
    fn check(error: Error, is: impl Fn(&Error) -> bool, says: &[&str]) {
        assert!(is(&error), "{error:?}");
        let message = error.to_string();
        assert!(says.iter().all(|part| message.contains(part)), "{message}");
    }
    on_mesh(&[2, 2], |_, mesh| {
        let device = Device::flex().autodiff();
        let x = || ramp([4, 4], 0.0, &device);
        check(
            error_of(DTensor::from_local(x(), mesh, &[R])),
            |error| {
                matches!(
                    error,
                    Error::Placement(PlacementError::Count {
                        placements: 1,
                        mesh_dims: 2,
                        ..
                    })
                )
            },
            &["one placement per mesh dimension"],
        );
        check(
            error_of(DTensor::distribute_replicated(x(), mesh, &[R, S(2)])),
            |error| {
                matches!(
                    error,
                    Error::Placement(PlacementError::DimOutOfRange {
                        mesh_dim: 1,
                        dim: 2,
                        ndim: 2
                    })
                )
            },
            &["S(2)", "mesh dimension 1"],
        );
        let full = DTensor::from_local(x(), mesh, &[R, R])?;
        for target in [AVG, MAX, PRODUCT] {
            check(
                error_of(full.clone().redistribute(&[R, target])),
                |error| {
                    matches!(
                        error,
                        Error::Placement(PlacementError::PartialTarget { mesh_dim: 1, .. })
                    )
                },
                &["only P(sum)"],
            );
        }
        check(
            error_of(DTensor::from_local(x(), mesh, &[SUM, MAX])),
            |error| matches!(error, Error::Placement(PlacementError::MixedPartial { .. })),
            &["P(sum)", "P(max)"],
        );
        let other = Layout::new(&[4, 1], &[R, R])?;
        check(
            error_of(full.clone().redistribute_to(&other)),
            |error| matches!(error, Error::DTensor(DTensorError::LayoutMesh { .. })),
            &["[4, 1]", "this mesh's `shape()`"],
        );
        check(
            error_of(DTensor::from_local_with_shape(
                x(),
                mesh,
                &[S(0), R],
                [5, 4],
            )),
            |error| matches!(error, Error::DTensor(DTensorError::LocalShape { .. })),
            &["[4, 4]", "[5, 4]", "S(0)", "`distribute_replicated`"],
        );
        let derived = x().require_grad() * 2.0;
        for (name, result) in [
            (
                "`distribute_tensor`",
                DTensor::distribute_tensor(derived.clone(), mesh, &[R, R]),
            ),
            (
                "`distribute_replicated`",
                DTensor::distribute_replicated(derived.clone(), mesh, &[R, R]),
            ),
        ] {
            check(
                error_of(result),
                |error| matches!(error, Error::DTensor(DTensorError::NotALeaf { .. })),
                &[name, "`detach`", "`from_local`"],
            );
        }
        for (name, result) in [
            (
                "`distribute_tensor`",
                DTensor::distribute_tensor(x(), mesh, &[R, SUM]),
            ),
            (
                "`distribute_replicated`",
                DTensor::distribute_replicated(x(), mesh, &[R, SUM]),
            ),
            ("`zeros`", DTensor::zeros([4, 4], mesh, &[R, SUM], &device)),
        ] {
            check(
                error_of(result),
                |error| {
                    matches!(
                        error,
                        Error::DTensor(DTensorError::Partial { placement: SUM, .. })
                    )
                },
                &[name, "1 (b)", "`redistribute`"],
            );
        }
        let rows = DTensor::from_local(x(), mesh, &[S(0), SUM])?;
        for grad in [[R, R], [S(1), R], [SUM, R], [S(0), S(0)], [S(0), AVG]] {
            check(
                error_of(rows.clone().to_local_with_grad_placements(&grad)),
                |error| matches!(error, Error::DTensor(DTensorError::GradPlacement { .. })),
                &["placed"],
            );
        }
        check(
            error_of(rows.vary(&[0])),
            |error| {
                matches!(
                    error,
                    Error::DTensor(DTensorError::NotReplicated {
                        placement: S(0),
                        ..
                    })
                )
            },
            &["0 (a)", "`all_gather_varying`"],
        );
        check(
            error_of(rows.vary(&[2])),
            |error| {
                matches!(
                    error,
                    Error::Mesh(MeshError::DimOutOfRange {
                        mesh_dim: 2,
                        ndim: 2,
                        ..
                    })
                )
            },
            &["below 2"],
        );
        for distribution in [
            Distribution::Bernoulli(1.5),
            Distribution::Uniform(1.0, 1.0),
            Distribution::Normal(0.0, -1.0),
            Distribution::Normal(0.0, f64::NAN),
        ] {
            check(
                error_of(DTensor::<2>::random(
                    [4, 4],
                    distribution,
                    0,
                    mesh,
                    &[R, R],
                    &device,
                )),
                |error| matches!(error, Error::DTensor(DTensorError::Distribution { .. })),
                &["is not a valid distribution"],
            );
        }
        check(
            error_of(DTensor::<1, Int>::random_range(
                [4],
                3..3,
                0,
                mesh,
                &[R, R],
                &device,
            )),
            |error| matches!(error, Error::DTensor(DTensorError::Distribution { .. })),
            &["3..3", "empty"],
        );
        let line = DeviceMesh::new(mesh.world(), [4], ["line"])?;
        let on_line = DTensor::from_local(x(), &line, &[R])?;
        let mismatch = full.spec().check_same_mesh(on_line.spec()).unwrap_err();
        check(
            mismatch.into(),
            |error| matches!(error, Error::DTensor(DTensorError::MeshMismatch { .. })),
            &["line", "`full_tensor`"],
        );
        Ok(())
    });
}

#[test]
fn a_rank_outside_the_mesh_is_told_so() {
    let found = launch(Launch::threads(3), |world| {
        let mesh = DeviceMesh::from_ranks(world, [0, 2], [2], ["pair"])?;
        let device = Device::flex();
        let full = ramp([4, 2], 0.0, &device);
        let results = [
            DTensor::from_local(full.clone(), &mesh, &[R]),
            DTensor::from_local_checked(full.clone(), &mesh, &[R]),
            DTensor::distribute_replicated(full.clone(), &mesh, &[S(0)]),
            DTensor::distribute_tensor(full, &mesh, &[S(0)]),
            DTensor::zeros([4, 2], &mesh, &[S(0)], &device),
        ];
        Ok(results.map(|result| match result {
            Err(Error::Mesh(MeshError::NotAMember { rank, .. })) => Some(rank),
            Err(error) => panic!("{error}"),
            Ok(_) => None,
        }))
    });
    let found = found.unwrap();
    assert_eq!(found, [(0, [None; 5]), (1, [Some(1); 5]), (2, [None; 5])]);
}

#[test]
fn ranks_that_disagree_are_found_by_the_checked_constructor() {
    on_mesh(&[2, 2], |world, mesh| {
        let device = Device::flex();
        let rank = world.rank();
        // Uneven parts: the global shape is found.
        let full = ramp([5, 3], 0.0, &device);
        let part = DTensor::distribute_replicated(full.clone(), mesh, &[S(0), S(1)])?.to_local();
        let found = DTensor::from_local_checked(part, mesh, &[S(0), S(1)])?;
        assert_eq!(found.dims(), [5, 3]);
        assert_eq!(found.full_tensor()?.into_data(), full.into_data());

        let own = ramp([4, 2], if rank == 2 { 1.0 } else { 0.0 }, &device);
        let error = error_of(DTensor::from_local_checked(own.clone(), mesh, &[R, R]));
        let expected = DTensorError::RanksDisagree {
            what: "the values",
            rank: 0,
            other: 2,
            found: String::new(),
            other_found: String::new(),
            remedy: "",
        };
        assert_disagree(&error, &expected);
        assert!(error.to_string().contains("`distribute_tensor`"), "{error}");
        // Along `b` ranks 0 and 1 are equal, and so are 2 and 3 once shifted alike.
        let own = ramp([4, 2], if rank >= 2 { 1.0 } else { 0.0 }, &device);
        DTensor::from_local_checked(own, mesh, &[S(0), R])?;

        let rows = if rank == 3 { 1 } else { 2 };
        let error = error_of(DTensor::from_local_checked(
            ramp([rows, 2], 0.0, &device),
            mesh,
            &[R, S(1)],
        ));
        assert!(
            matches!(
                error,
                Error::DTensor(DTensorError::LocalShape { rank: 3, .. })
            ),
            "{error}"
        );

        let dtype = if rank == 1 { DType::F16 } else { DType::F32 };
        let own = ramp([2, 2], 0.0, &device).cast(dtype);
        let error = error_of(DTensor::from_local_checked(own, mesh, &[S(0), R]));
        assert!(
            error
                .to_string()
                .contains("ranks 0 and 1 disagree on the dtype of one tensor: f32 and f16"),
            "{error}"
        );

        let own = ramp([2, 2], 0.0, &device.clone().autodiff()).set_require_grad(rank != 2);
        let error = error_of(DTensor::from_local_checked(own, mesh, &[S(0), R]));
        assert!(
            error
                .to_string()
                .contains("require_grad = true and require_grad = false"),
            "{error}"
        );
        Ok(())
    });

    fn assert_disagree(error: &Error, expected: &DTensorError) {
        let key = |error: &DTensorError| match error {
            DTensorError::RanksDisagree {
                what, rank, other, ..
            } => (*what, *rank, *other),
            other => panic!("{other}"),
        };
        match error {
            Error::DTensor(error) => assert_eq!(key(error), key(expected)),
            other => panic!("{other}"),
        }
    }
}

#[test]
fn ranks_that_go_different_ways_are_told_of_each_other() {
    let error = launch(Launch::threads(2), |world| {
        let mesh = DeviceMesh::new(world, [2], ["a"])?;
        let x = DTensor::from_local(ramp([4, 4], 0.0, &Device::flex()), &mesh, &[S(0)])?;
        let to = if world.rank() == 0 { R } else { S(1) };
        x.redistribute(&[to])?;
        Ok(())
    })
    .unwrap_err();
    assert!(
        matches!(error.cause, Error::Comm(CommError::Mismatch { .. })),
        "{error}"
    );
    let message = error.to_string();
    // Whichever rank is found to differ.
    let named = [
        "rank 0",
        "rank 1",
        "redistribute [S(0)] -> ",
        "all_gather",
        "all_to_all",
    ];
    assert!(named.iter().all(|part| message.contains(part)), "{message}");
}

#[test]
fn a_rank_that_leaves_before_backward_is_named_by_those_that_wait() {
    let error = launch(Launch::threads(2), |world| {
        let mesh = DeviceMesh::new(world, [2], ["a"])?;
        let leaf = ramp([4], 0.0, &Device::flex().autodiff()).require_grad();
        let x = DTensor::from_local(leaf, &mesh, &[R])?;
        let y = x.redistribute(&[S(0)])?.to_local().sum();
        if world.rank() == 0 {
            y.backward();
        }
        Ok(())
    })
    .unwrap_err();
    let Error::Comm(CommError::RankReturned { rank: 1, during }) = &error.cause else {
        panic!("{error}");
    };
    assert!(
        during.to_string().contains("redistribute [R] -> [S(0)]"),
        "{during}"
    );
}

/// What ranks are told whose whole tensors have `rows[rank]` rows of 2, in `program`.
fn unequal_rows(
    rows: [usize; 2],
    program: impl Fn(DTensor<2>) -> Result<(), Error> + Sync,
) -> String {
    let error = launch(Launch::threads(2), |world| {
        let mesh = DeviceMesh::new(world, [2], ["x"])?;
        let full = Tensor::<2>::ones([rows[world.rank()], 2], world.device());
        program(DTensor::distribute_replicated(full, &mesh, &[S(0)])?)
    });
    let cause = error.unwrap_err().cause;
    let Error::Comm(CommError::Mismatch { differs, .. }) = cause else {
        panic!("{cause}")
    };
    differs
}

#[test]
fn ranks_whose_tensors_have_other_global_shapes_are_told() {
    // What travels is one number on either rank.
    let told = unequal_rows([4, 6], |x| x.sum().full_tensor().map(drop));
    assert!(
        ["[4, 2] vs [6, 2]", "[6, 2] vs [4, 2]"]
            .iter()
            .any(|differs| told.ends_with(differs)),
        "{told}"
    );
    // Also when more is computed of it, with others like it, before it travels.
    let told = unequal_rows([4, 6], |x| {
        let sum = x.clone().sum() * 0.5;
        let squares = x.square().sum();
        (sum + squares).full_tensor().map(drop)
    });
    assert!(told.starts_with("reduction of "), "{told}");
    // And where the parts themselves would do.
    let told = unequal_rows([4, 6], |x| x.full_tensor().map(drop));
    assert!(told.starts_with("global tensor "), "{told}");
}

#[test]
fn a_sum_that_grows_from_step_to_step_stays_one_of_few_specs() {
    on_mesh(&[2], |_, mesh| {
        let x = |rows| DTensor::<2>::ones([rows, 2], mesh, &[S(0)], mesh.device());
        let mut sum = x(4)?.sum();
        let mut specs = Vec::new();
        for rows in [4, 6, 8, 4, 6, 8] {
            sum = sum + x(rows)?.sum();
            specs.push(sum.spec().clone());
        }
        assert_eq!(specs[0], specs[5]);
        assert_eq!(sum.full_tensor()?.into_scalar::<f32>(), 2.0 * 40.0);
        Ok(())
    });
}

/// A rule of one dimension whose output is longer than its input. `more` is no part of what tells
/// rules apart.
#[derive(Debug, Clone)]
struct Longer {
    more: usize,
}

impl PartialEq for Longer {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Longer {}

impl Hash for Longer {
    fn hash<H: Hasher>(&self, _: &mut H) {}
}

impl ShardingRule for Longer {
    fn name(&self) -> &'static str {
        "longer"
    }

    fn outputs(&self, inputs: &[Shape]) -> Result<Vec<Shape>> {
        Ok(vec![Shape::new([inputs[0][0] + self.more])])
    }

    fn strategies(&self, _: &[Shape], _: &[Shape]) -> Vec<Strategy> {
        Vec::new()
    }
}

/// The tensor would not be what its spec says: for the first call with a rule, and, where a rule
/// does not compare all its arguments, for a later one. Every rank has the error, also where debug
/// assertions are off.
#[test]
fn a_rule_that_promises_another_shape_than_its_operator_makes_is_found() {
    for calls in [&[(1, 0)][..], &[(0, 0), (2, 2)], &[(1, 1), (1, 1), (0, 0)]] {
        let errors = MeshTest::new([2], ["tp"]).run(|mesh| {
            let x = DTensor::<1>::ones([4], mesh, &[R], mesh.device())?;
            let run = |&(said, made): &(usize, usize)| {
                let local =
                    |x: Tensor<1>, _: &Operator| Tensor::<1>::zeros([4 + made], &x.device());
                let run = AssertUnwindSafe(|| apply(&Longer { more: said }, x.clone(), local));
                catch_unwind(run)
                    .err()
                    .map(|error| *error.downcast::<Error>().expect("a typed error"))
            };
            let errors: Vec<_> = calls.iter().map(run).collect();
            assert!(
                errors[..calls.len() - 1].iter().all(Option::is_none),
                "{errors:?}"
            );
            Ok((
                errors.into_iter().next_back().flatten(),
                calls[0].0,
                calls[calls.len() - 1].1,
            ))
        });
        assert_eq!(errors.len(), 2, "one for each rank");
        for (error, said, made) in errors {
            let error = error.unwrap_or_else(|| panic!("{calls:?}"));
            let Error::DTensor(DTensorError::OutputShape {
                operator: "longer",
                output: 0,
                found,
                expected,
            }) = &error
            else {
                panic!("{calls:?}: {error}")
            };
            assert_eq!(
                (&found[..], &expected[..]),
                (&[4 + made][..], &[4 + said][..]),
                "{calls:?}"
            );
            assert!(
                error
                    .to_string()
                    .contains("included in its `Eq` and `Hash`"),
                "{error}"
            );
        }
    }
}

/// Of forty products, the one whose shapes do not fit.
#[test]
fn an_operator_that_unwinds_names_the_line_it_was_called_in() {
    let line = line!() + 4;
    let failed = launch(Launch::threads(2), |world| {
        let mesh = DeviceMesh::new(world, [2], ["tp"])?;
        let x = DTensor::<2>::ones([4, 3], &mesh, &[R], world.device())?;
        Ok(x.clone().matmul(x).to_local().into_data())
    });
    let error = failed.expect_err("3 columns meet 4 rows");
    let at = error.at.as_ref().expect("an operator unwound");
    assert!(at.starts_with(&format!("{}:{line}:", file!())), "{error}");
    assert!(
        error.to_string().contains(&format!("\n  in {at}")),
        "{error}"
    );
}

/// Letters that a crate of one's own gets wrong.
#[test]
fn a_rule_that_does_not_fit_its_operator_says_where() {
    const LONGER: EinsumRule = EinsumRule::new("longer", "..d.. -> ..K..");
    const PAIR: EinsumRule = EinsumRule::new("pair", "rc -> rc, rc");
    const PRODUCT: EinsumRule = EinsumRule::new("product", "mk, kn -> mn");
    let message = |operator: fn(DTensor<2>) -> DTensor<2>| {
        let failed = launch(Launch::threads(1), |world| {
            let mesh = DeviceMesh::new(world, [1], ["tp"])?;
            Ok(
                operator(DTensor::ones([4, 3], &mesh, &[R], world.device())?)
                    .to_local()
                    .into_data(),
            )
        });
        failed.expect_err("the rule does not fit").to_string()
    };
    for (operator, says) in [
        (
            (|x| apply(&LONGER.at([0]), x, |x: Tensor<2>, _| x)) as fn(DTensor<2>) -> _,
            "Set its length with `lens`",
        ),
        (
            |x| apply(&LONGER.at([2]).lens([1]), x, |x: Tensor<2>, _| x),
            "must have 3 dimensions or more, but has 2",
        ),
        (
            |x| apply(&PAIR, x, |x: Tensor<2>, _| x),
            "`pair` returned 1 outputs, but its rule has 2",
        ),
        (
            |x| apply(&PRODUCT, x, |x: Tensor<2>, _| x),
            "`mk, kn -> mn` takes 2 inputs, but 1 were passed",
        ),
        (
            |x| {
                apply(
                    &PRODUCT,
                    (x.clone(), x),
                    |(a, b): (Tensor<2>, Tensor<2>), _| a.matmul(b),
                )
            },
            "in `mk, kn -> mn`, axis `k` is 3 in the first input and 4 in the second. Make them equal",
        ),
    ] {
        let message = message(operator);
        assert!(message.contains(says), "{message}");
    }
}

/// What burn-flex would abort on, or compute something else of.
#[test]
fn shapes_that_only_look_as_if_they_fit_are_refused() {
    MeshTest::new([1], ["tp"]).run(|mesh| {
        let ones =
            |shape: &[usize]| Tensor::<1>::ones([shape.iter().product::<usize>()], mesh.device());
        let matrix = |shape: [usize; 2]| -> Result<DTensor<2>> {
            DTensor::from_local(ones(&shape).reshape(shape), mesh, &[R])
        };
        let refused = |run: &dyn Fn() -> Result<DTensor<1>>, says: &str| {
            let error = unwound(run);
            assert!(error.to_string().contains(says), "{error}");
        };
        let vector = || DTensor::<1>::from_local(ones(&[3]), mesh, &[R]);
        for equation in ["i,ii->i", "ii,i->i"] {
            for shape in [[3, 1], [1, 3]] {
                let operands = || -> Result<_> {
                    let (a, b) = (vector()?.into(), matrix(shape)?.into());
                    Ok(if equation.starts_with("ii") {
                        [b, a]
                    } else {
                        [a, b]
                    })
                };
                refused(
                    &|| Ok(DTensor::einsum(equation, operands()?)),
                    "axis `i` is",
                );
            }
        }
        let logits = DTensor::<3>::ones([2, 5, 4], mesh, &[R], mesh.device())?;
        let targets = DTensor::<1, Int>::zeros([5], mesh, &[R], mesh.device())?;
        let run = || Ok(loss::cross_entropy(logits.clone(), targets.clone()));
        refused(
            &run,
            "`..` is 2 dimensions in the first input, but 1 in the second. Make the numbers equal",
        );
        Ok(())
    });
}
