//! Ragged cuts: every rank holds as much as it was told to, also nothing.

use burn::tensor::{Device, Tensor, activation};
use burn_dtensor::comm::{CommError, Launch, launch};
use burn_dtensor::dtensor::ops::RedistributePolicy;
use burn_dtensor::dtensor::ops::activation::softmax;
use burn_dtensor::dtensor::{DTensor, DTensorError};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::placement::{Layout, Placement, PlacementError};
use burn_dtensor::{Error, Result};

use super::{R, S, SUM, error_of, on_mesh, part, ramp, values};

const SHAPE: [usize; 2] = [6, 4];

/// With lengths for some mesh dimensions.
fn uneven(mesh: &[usize], placements: &[Placement], lengths: &[(usize, &[usize])]) -> Layout {
    let layout = Layout::new(mesh, placements).unwrap();
    lengths.iter().fold(layout, |layout, &(mesh_dim, lengths)| {
        layout.with_uneven_sizes(mesh_dim, lengths).unwrap()
    })
}

/// Of tensors of [`SHAPE`]: ragged and not, on three ranks.
fn on_three() -> Vec<Layout> {
    let one = |placement, lengths: &[usize]| uneven(&[3], &[placement], &[(0, lengths)]);
    let plain = [R, S(0), S(1)].map(|placement| uneven(&[3], &[placement], &[]));
    let given = [
        one(S(0), &[1, 3, 2]),
        one(S(0), &[0, 5, 1]),
        one(S(1), &[0, 0, 4]),
        one(S(1), &[1, 2, 1]),
    ];
    plain.into_iter().chain(given).collect()
}

/// The same on 2 x 3: ragged cuts outside others, beside them, inside them and turned.
fn on_two_by_three() -> Vec<Layout> {
    let mesh = [2, 3];
    let turned = Layout::with_shard_order(&mesh, &[S(0), S(0)], &[(0, &[1, 0])]).unwrap();
    vec![
        uneven(&mesh, &[S(0), S(1)], &[]),
        uneven(&mesh, &[S(0), S(1)], &[(0, &[4, 2]), (1, &[3, 0, 1])]),
        uneven(&mesh, &[S(0), S(0)], &[(0, &[1, 5])]),
        uneven(&mesh, &[S(0), S(0)], &[(1, &[0, 1, 2])]),
        uneven(&mesh, &[S(0), S(0)], &[(0, &[3, 3]), (1, &[2, 0, 1])]),
        turned.with_uneven_sizes(1, [1, 0, 5]).unwrap(),
        uneven(&mesh, &[R, S(1)], &[(1, &[0, 2, 2])]),
        uneven(&mesh, &[S(1), R], &[]),
    ]
}

/// The part of the whole that the picture in the layouts' doc says: lengths before this rank's are
/// skipped.
#[test]
fn parts_are_as_long_as_they_were_told() {
    on_mesh(&[3], |world, mesh| {
        for lengths in [[1, 3, 2], [0, 5, 1], [6, 0, 0], [2, 2, 2]] {
            let layout = || uneven(&[3], &[S(0)], &[(0, &lengths)]);
            let full = || ramp(SHAPE, 1.0, &Device::flex().autodiff()).require_grad();
            let start: usize = lengths[..world.rank()].iter().sum();
            let expected = (start * 4..(start + lengths[world.rank()]) * 4).map(|i| i as f32 + 1.0);
            let expected: Vec<f32> = expected.collect();
            let local = DTensor::distribute_replicated_to(full(), mesh, layout())?;
            let sent = DTensor::distribute_tensor_to(full() * 1.0, mesh, layout());
            assert!(matches!(
                sent,
                Err(Error::DTensor(DTensorError::NotALeaf { .. }))
            ));
            let sent = DTensor::distribute_tensor_to(full(), mesh, layout())?;
            let held = Tensor::<2>::from_data(
                burn::tensor::TensorData::new(expected.clone(), [lengths[world.rank()], 4]),
                &Device::flex().autodiff(),
            );
            let read = DTensor::from_local_with_layout(held, mesh, layout(), SHAPE)?;
            for x in [local, sent, read] {
                assert_eq!(values(x.local().clone()), expected, "{lengths:?}");
                assert_eq!(x.spec().local_shape().to_vec(), [lengths[world.rank()], 4]);
                assert_eq!(values(x.full_tensor()?), values(full()), "{lengths:?}");
            }
        }
        Ok(())
    });
}

/// From everywhere to everywhere, with the gradient on the way back.
#[test]
fn redistribution_moves_values_and_gradients() {
    for (mesh, layouts) in [(&[3][..], on_three()), (&[2, 3], on_two_by_three())] {
        on_mesh(mesh, |_, mesh| {
            let device = Device::flex().autodiff();
            for (from, to) in layouts
                .iter()
                .flat_map(|from| layouts.iter().map(move |to| (from, to)))
            {
                let leaf = ramp(SHAPE, 1.0, &device).require_grad();
                let x = DTensor::distribute_replicated_to(leaf, mesh, from.clone())?;
                let moved = x.clone().redistribute_to(to)?;
                assert_eq!(moved.layout(), to);
                assert_eq!(
                    values(moved.local().clone()),
                    part(ramp(SHAPE, 1.0, &device), &moved),
                    "{from} -> {to}"
                );
                let weights = ramp(SHAPE, 0.5, &device);
                let weighed = moved.full_tensor()? * weights.clone();
                let grads = weighed.sum().backward();
                assert_eq!(
                    values(x.local().grad(&grads).unwrap()),
                    part(weights, &x),
                    "{from} -> {to}"
                );
            }
            Ok(())
        });
    }
}

/// Placements alone mean chunks, also where the tensor has them already in other lengths.
#[test]
fn placements_without_lengths_are_chunks() {
    on_mesh(&[3], |world, mesh| {
        let layout = uneven(&[3], &[S(0)], &[(0, &[1, 3, 2])]);
        let x = DTensor::distribute_replicated_to(ramp(SHAPE, 1.0, &Device::flex()), mesh, layout)?;
        let even = x.redistribute(&[S(0)])?;
        assert_eq!(even.layout(), &uneven(&[3], &[S(0)], &[]));
        let first = world.rank() as f32 * 8.0 + 1.0;
        assert_eq!(
            values(even.local().clone()),
            Vec::from_iter((0..8).map(|i| first + i as f32))
        );
        Ok(())
    });
}

/// A partial sum is scattered into the lengths.
#[test]
fn a_partial_sum_is_reduced_into_the_lengths() {
    for lengths in [[1, 3, 2], [0, 5, 1]] {
        on_mesh(&[3], |world, mesh| {
            let device = Device::flex().autodiff();
            let term = ramp(SHAPE, world.rank() as f32, &device).require_grad();
            let sum = DTensor::from_local(term.clone(), mesh, &[SUM])?;
            let sizes = sum.redistribute_to(&uneven(&[3], &[S(0)], &[(0, &lengths)]))?;
            let full = ramp(SHAPE, 1.0, &device) * 3.0;
            assert_eq!(values(sizes.local().clone()), part(full, &sizes));
            let weights = ramp(SHAPE, 0.5, &device);
            let grads = (sizes.full_tensor()? * weights.clone()).sum().backward();
            assert_eq!(values(term.grad(&grads).unwrap()), values(weights));
            Ok(())
        });
    }
}

/// Where a rule keeps the dimension, nothing moves; forward and backward are burn's.
#[test]
fn operators_keep_the_lengths() {
    let rows: [(&[usize], Layout); 3] = [
        (&[3], uneven(&[3], &[S(0)], &[(0, &[1, 3, 2])])),
        (&[2, 3], uneven(&[2, 3], &[S(0), R], &[(0, &[5, 1])])),
        (
            &[2, 3],
            uneven(&[2, 3], &[S(0), S(0)], &[(0, &[3, 3]), (1, &[1, 1, 1])]),
        ),
    ];
    for (shape, layout) in rows {
        on_mesh(shape, |_, mesh| {
            let device = Device::flex().autodiff();
            let leaf = |offset| {
                ramp(SHAPE, offset, &device)
                    .div_scalar(10.0)
                    .detach()
                    .require_grad()
            };
            let (a, b, w) = (
                leaf(1.0),
                leaf(-7.0),
                ramp([4, 2], -3.0, &device).require_grad(),
            );
            let own = |x: &Tensor<2>| {
                DTensor::distribute_replicated_to(
                    x.clone().detach().require_grad(),
                    mesh,
                    layout.clone(),
                )
            };
            let (own_a, own_b) = (own(&a)?, own(&b)?);
            let own_w = DTensor::distribute_replicated(
                w.clone().detach().require_grad(),
                mesh,
                &vec![R; shape.len()],
            )?;
            let plain =
                activation::softmax(a.clone().exp() * b.clone() + a.clone(), 1).matmul(w.clone());
            let result = RedistributePolicy::Deny.run(|| {
                let y = own_a.clone().exp() * own_b.clone() + own_a.clone();
                assert_eq!(y.layout(), &layout);
                softmax(y, 1).matmul(own_w.clone())
            });
            assert_eq!(result.layout(), &layout);
            assert_eq!(
                result.spec().local_shape()[0],
                own_a.spec().local_shape()[0]
            );
            let close = |found: Vec<f32>, expected: Vec<f32>| {
                assert_eq!(found.len(), expected.len());
                assert!(
                    found
                        .iter()
                        .zip(&expected)
                        .all(|(a, b)| (a - b).abs() < 1e-4),
                    "{found:?} {expected:?}"
                );
            };
            close(values(result.local().clone()), part(plain.clone(), &result));
            let expected = (plain.clone() * plain).sum().backward();
            let grads = (result.clone() * result).sum().full_tensor()?.backward();
            for (full, own) in [(&a, &own_a), (&b, &own_b), (&w, &own_w)] {
                close(
                    values(own.local().grad(&grads).unwrap()),
                    part(full.grad(&expected).unwrap(), own),
                );
            }
            Ok(())
        });
    }
}

/// The lengths of one operand, or of neither, where two disagree.
#[test]
fn operands_of_other_shard_sizes_are_redistributed() {
    let layouts = on_three();
    on_mesh(&[3], |_, mesh| {
        let device = Device::flex().autodiff();
        for (left, right) in layouts
            .iter()
            .flat_map(|left| layouts.iter().map(move |right| (left, right)))
        {
            let own = |offset, layout: &Layout| {
                DTensor::distribute_replicated_to(
                    ramp(SHAPE, offset, &device).require_grad(),
                    mesh,
                    layout.clone(),
                )
            };
            let (x, y) = (own(1.0, left)?, own(2.0, right)?);
            let product = x.clone() * y.clone();
            let full = ramp(SHAPE, 1.0, &device) * ramp(SHAPE, 2.0, &device);
            assert_eq!(
                values(product.local().clone()),
                part(full, &product),
                "{left} {right}"
            );
            let grads = product.sum().full_tensor()?.backward();
            assert_eq!(
                values(x.local().grad(&grads).unwrap()),
                part(ramp(SHAPE, 2.0, &device), &x),
                "{left} {right}"
            );
            assert_eq!(
                values(y.local().grad(&grads).unwrap()),
                part(ramp(SHAPE, 1.0, &device), &y),
                "{left} {right}"
            );
        }
        Ok(())
    });
}

/// A replicated operand is sliced as the other is cut; nothing is sent.
#[test]
fn replicated_operands_are_split_into_the_shard_sizes() {
    on_mesh(&[3], |world, mesh| {
        let layout = uneven(&[3], &[S(0)], &[(0, &[1, 3, 2])]);
        let full = || ramp(SHAPE, 1.0, &Device::flex());
        let x = DTensor::distribute_replicated_to(full(), mesh, layout.clone())?;
        let y = DTensor::distribute_replicated(full(), mesh, &[R])?;
        world.ledger().reset();
        let sum = y + x;
        assert_eq!(world.ledger().total(|_| true).calls, 0);
        assert_eq!(sum.layout(), &layout);
        assert_eq!(values(sum.full_tensor()?), values(full() * 2.0));
        Ok(())
    });
}

/// Rows that are no longer rows: the lengths fit no dimension of the result.
#[test]
fn what_does_not_keep_the_dimension_gathers() {
    on_mesh(&[3], |_, mesh| {
        let layout = uneven(&[3], &[S(0)], &[(0, &[1, 3, 2])]);
        let device = Device::flex().autodiff();
        let x = DTensor::distribute_replicated_to(
            ramp(SHAPE, 1.0, &device).require_grad(),
            mesh,
            layout,
        )?;
        let flat: DTensor<1> = x.clone().reshape([24]);
        assert!(!flat.layout().is_uneven());
        assert_eq!(
            values(flat.clone().full_tensor()?),
            values(ramp(SHAPE, 1.0, &device))
        );
        let doubled = DTensor::cat(vec![x.clone(), x.clone()], 0);
        assert!(!doubled.layout().is_uneven());
        assert_eq!(doubled.dims(), [12, 4]);
        let grads = (flat.sum() + doubled.sum()).full_tensor()?.backward();
        assert!(
            values(x.local().grad(&grads).unwrap())
                .iter()
                .all(|grad| *grad == 3.0)
        );
        Ok(())
    });
}

#[test]
fn lengths_that_do_not_fit_are_typed_errors_on_every_rank() {
    on_mesh(&[3], |_, mesh| {
        let layout = || uneven(&[3], &[S(0)], &[(0, &[1, 3, 1])]);
        let full = || ramp(SHAPE, 1.0, &Device::flex());
        let x = DTensor::distribute_replicated(full(), mesh, &[S(0)])?;
        for error in [
            error_of(DTensor::distribute_tensor_to(full(), mesh, layout())),
            error_of(DTensor::distribute_replicated_to(full(), mesh, layout())),
            error_of(DTensor::from_local_with_layout(
                full(),
                mesh,
                layout(),
                SHAPE,
            )),
            error_of(x.redistribute_to(&layout())),
        ] {
            let expected = PlacementError::ShardSizeSum {
                mesh_dim: 0,
                dim: 0,
                lengths: vec![1, 3, 1],
                len: 6,
            };
            assert!(
                matches!(&error, Error::Placement(found) if *found == expected),
                "{error}"
            );
        }
        Ok(())
    });
}

#[test]
fn ranks_that_disagree_on_lengths_are_told() {
    let error = launch(Launch::threads(2), |world| -> Result<()> {
        let mesh = DeviceMesh::new(world, [2], ["a"])?;
        let lengths = [[2, 4], [2, 4]][world.rank()];
        let x = DTensor::distribute_replicated_to(
            ramp(SHAPE, 1.0, &Device::flex()),
            &mesh,
            uneven(&[2], &[S(0)], &[(0, &lengths)]),
        )?;
        let other = [[1, 5], [5, 1]][world.rank()];
        // The label holds both layouts, so it is what differs first.
        let x = x.redistribute(&[R])?;
        let y = x.redistribute_to(&uneven(&[2], &[S(0)], &[(0, &other)]))?;
        y.redistribute(&[R]).map(drop)
    })
    .expect_err("they disagree");
    let text = error.to_string();
    assert!(
        matches!(error.cause, Error::Comm(CommError::Mismatch { .. })),
        "{text}"
    );
    assert!(text.contains("1 + 5") && text.contains("5 + 1"), "{text}");
}

/// What to write says the lengths.
#[test]
fn a_denied_move_names_the_lengths() {
    on_mesh(&[2], |_, mesh| {
        let layout = |lengths: [usize; 2]| uneven(&[2], &[S(0)], &[(0, &lengths)]);
        let own = |lengths| {
            DTensor::distribute_replicated_to(
                ramp(SHAPE, 1.0, &Device::flex()),
                mesh,
                layout(lengths),
            )
        };
        let (x, y) = (own([1, 5])?, own([4, 2])?);
        let error = RedistributePolicy::Deny.run(|| {
            let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| x + y));
            caught.map(drop).expect_err("they are cut differently")
        });
        let error = error
            .downcast_ref::<Error>()
            .expect("a typed error")
            .to_string();
        let written = "Layout::with_shard_order(mesh.shape(), &[Shard(0)], &[(0, &[0])])?.with_uneven_sizes(0, [";
        assert!(error.contains(written), "{error}");
        Ok(())
    });
}
