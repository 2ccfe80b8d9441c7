//! Along a dimension that is cut, without the whole of it: values and gradients are burn's on the
//! whole, and what is sent is a few elements of each part.

use burn::tensor::{Device, FloatDType, Int, IntDType, Tensor, TensorData};
use burn_dtensor::Result;
use burn_dtensor::comm::{Op, Phase};
use burn_dtensor::dtensor::DTensor;
use burn_dtensor::dtensor::ops::RedistributePolicy;
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::placement::Layout;
use itertools::Itertools;

use super::{R, S, on_mesh, part, values};

const ROWS: usize = 2;

/// Of `[2, len]`: the second dimension is cut into even and uneven parts, some of them empty, by
/// one and by two mesh dimensions in either order, also beside a cut of the first.
fn layouts(mesh: &[usize], len: usize) -> Vec<Layout> {
    let layout = |placements: &[_]| Layout::new(mesh, placements).unwrap();
    let uneven = |layout: Layout, lengths: &[usize]| layout.with_uneven_sizes(0, lengths).unwrap();
    match mesh {
        [2] => vec![
            layout(&[S(1)]),
            uneven(layout(&[S(1)]), &[1, len - 1]),
            uneven(layout(&[S(1)]), &[len, 0]),
        ],
        [3] => vec![layout(&[S(1)]), uneven(layout(&[S(1)]), &[2, len - 3, 1])],
        _ => vec![
            layout(&[S(1), S(1)]),
            Layout::with_shard_order(mesh, &[S(1), S(1)], &[(1, &[1, 0])]).unwrap(),
            layout(&[S(0), S(1)]),
            layout(&[S(1), R]),
        ],
    }
}

const MESHES: [&[usize]; 4] = [&[2], &[3], &[2, 2], &[2, 3]];

/// Equal, NaN where the other is.
#[track_caller]
fn assert_close(found: &[f32], expected: &[f32], what: &str) {
    let close = |(a, b): (&f32, &f32)| {
        (a.is_nan() && b.is_nan()) || a == b || (a - b).abs() <= 1e-5 * b.abs().max(1.0)
    };
    assert!(
        found.len() == expected.len() && found.iter().zip(expected).all(close),
        "{what}: {found:?}, not {expected:?}"
    );
}

/// `$body` of a DTensor in every layout and of the whole tensor; with gradients if so said.
macro_rules! check {
    ($values:expr, $gradients:expr, |$x:ident| $body:expr) => {{
        let rows: Vec<f32> = $values;
        let len = rows.len() / ROWS;
        for mesh in MESHES {
            on_mesh(mesh, |_, mesh| {
                let devices = super::tracked_devices();
                for (layout, device) in layouts(mesh.shape(), len)
                    .into_iter()
                    .cartesian_product(devices)
                {
                    let data = TensorData::new(rows.clone(), [ROWS, len]);
                    let leaf = || Tensor::<2>::from_data(data.clone(), &device).require_grad();
                    let what = format!("{} of {rows:?} {layout}", stringify!($body));
                    let full = leaf();
                    let $x = full.clone();
                    let expected = {
                        #[allow(unused_imports)]
                        use burn::tensor::activation::*;
                        $body
                    };
                    let own = DTensor::distribute_replicated_to(leaf(), mesh, layout)?;
                    let $x = own.clone();
                    let found = {
                        #[allow(unused_imports)]
                        use burn_dtensor::dtensor::ops::activation::*;
                        $body
                    };
                    let found = found.full_tensor()?;
                    assert_close(&values(found.clone()), &values(expected.clone()), &what);
                    if $gradients {
                        let weights = super::ramp(expected.dims(), 0.5, &device);
                        let expected = (expected * weights.clone()).sum().backward();
                        let found = (found * weights).sum().backward();
                        let found = values(own.local().grad(&found).expect("a leaf"));
                        assert_close(
                            &found,
                            &part(full.grad(&expected).expect("a leaf"), &own),
                            &what,
                        );
                    }
                }
                Ok(())
            });
        }
    }};
}

/// Rows of 21, so that six parts have fewer extrema, with their places, than elements.
fn long_rows(values: [f32; 7]) -> Vec<f32> {
    let row = values.repeat(3);
    [row.clone(), row.into_iter().rev().collect()].concat()
}

/// Rows of seven: with ties, zeros and an infinity; the second mirrors the first.
fn rows(values: [f32; 7]) -> Vec<f32> {
    values.into_iter().chain(values.into_iter().rev()).collect()
}

#[test]
fn accumulations_are_those_of_the_full_tensor() {
    for values in [
        [3.0, -1.0, 2.0, 2.0, 5.0, 5.0, -4.0],
        [0.5, 0.0, 3.0, 3.0, 0.0, 1.0, 2.0],
        [1.0; 7],
    ] {
        check!(rows(values), true, |x| x.cumsum(1));
        check!(rows(values), true, |x| x.cumprod(1));
        check!(rows(values), true, |x| x.cummax(1));
        check!(rows(values), true, |x| x.cummin(1));
    }
}

#[test]
fn accumulations_are_nan_where_those_of_the_full_tensor_are() {
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    let cases = [
        [1.0, nan, 3.0, 9.0, 0.0, 1.0, 2.0],
        [1.0, 2.0, inf, 0.0, 4.0, -inf, 7.0],
        [-inf; 7],
        [inf; 7],
    ];
    for values in cases {
        check!(rows(values), false, |x| x.cumsum(1));
        check!(rows(values), false, |x| x.cumprod(1));
        check!(rows(values), false, |x| x.cummax(1));
        check!(rows(values), false, |x| x.cummin(1));
    }
}

#[test]
fn extrema_are_the_first_of_equal_ones_and_no_number_comes_before_all() {
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    let cases = [
        [3.0, 5.0, 5.0, 1.0, 5.0, 1.0, 5.0],
        [2.0; 7],
        [1.0, 9.0, nan, 0.0, nan, 7.0, -9.0],
        [-inf, -inf, inf, -inf, inf, -inf, -inf],
    ];
    for values in cases {
        let tracked = !values.contains(&inf);
        check!(long_rows(values), tracked, |x| x.max_dim_with_indices(1).0);
        check!(long_rows(values), tracked, |x| x.min_dim_with_indices(1).0);
        check!(long_rows(values), false, |x| x
            .max_dim_with_indices(1)
            .1
            .float());
        check!(long_rows(values), false, |x| x
            .min_dim_with_indices(1)
            .1
            .float());
        check!(long_rows(values), false, |x| x.argmax(1).float());
        check!(long_rows(values), false, |x| x.argmin(-1).float());
    }
}

/// Of 24: the largest of four parts are few enough for `k` of 2, and those of six for 1; else the
/// dimension is gathered.
#[test]
fn the_largest_are_those_of_the_full_tensor() {
    let shuffled: Vec<f32> = (0..48).map(|i| ((i * 29 + 7) % 48) as f32).collect();
    let with_nan: Vec<f32> = shuffled
        .iter()
        .map(|&x| if x == 20.0 || x == 3.0 { f32::NAN } else { x })
        .collect();
    for values in [shuffled, with_nan] {
        check!(values.clone(), true, |x| x.topk(2, 1));
        check!(values.clone(), true, |x| x.topk_with_indices(2, 1).0);
        check!(values.clone(), false, |x| x
            .topk_with_indices(2, 1)
            .1
            .float());
        check!(values.clone(), false, |x| x.argtopk(1, 1).float());
        check!(values.clone(), true, |x| x.topk(5, 1));
        check!(values.clone(), false, |x| x.argtopk(11, 1).float());
    }
}

/// burn's sort keeps no order among equals, so only what is there is compared.
#[test]
fn the_largest_of_equal_ones_are_where_they_are_said_to_be() {
    let tied: Vec<f32> = (0..64).map(|i| (i * 7 % 5) as f32).collect();
    on_mesh(&[4], |_, mesh| {
        let full = Tensor::<1>::from_floats(&tied[..], mesh.device());
        let x = DTensor::distribute_replicated(full.clone(), mesh, &[S(0)])?;
        let (found, places) = x.topk_with_indices(5, 0);
        let (found, places) = (values(found.full_tensor()?), places.full_tensor()?);
        assert_eq!(found, [4.0; 5]);
        assert_eq!(values(full.gather(0, places.clone())), found);
        let mut places: Vec<i64> = places.into_data().iter::<i64>().collect();
        places.sort_unstable();
        places.dedup();
        assert_eq!(places.len(), 5);
        Ok(())
    });
}

#[test]
fn softmaxes_are_those_of_the_full_tensor_also_where_shards_are_masked() {
    let inf = f32::INFINITY;
    let cases = [
        [3.0, -1.0, 2.0, 2.5, 80.0, -80.0, -4.0],
        [-inf, -inf, -inf, -inf, 1.0, 2.0, -inf],
        [-1000.0, -1001.0, -1002.0, -999.0, -inf, -inf, -inf],
    ];
    for values in cases {
        check!(rows(values), true, |x| softmax(x, 1));
        check!(rows(values), false, |x| log_softmax(x, 1));
        check!(rows(values), true, |x| quiet_softmax(x, 1));
        let negated = values.map(|x| -x);
        check!(rows(negated), true, |x| softmin(x, 1));
    }
    check!(rows(cases[0]), true, |x| log_softmax(x, 1));
}

#[test]
fn softmaxes_are_nan_where_those_of_the_full_tensor_are() {
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    for values in [
        [-inf; 7],
        [1.0, 2.0, nan, 3.0, 4.0, 5.0, 6.0],
        [1.0, 2.0, 3.0, inf, 4.0, 5.0, 6.0],
    ] {
        check!(rows(values), false, |x| softmax(x, 1));
        check!(rows(values), false, |x| log_softmax(x, 1));
        check!(rows(values), false, |x| quiet_softmax(x, 1));
    }
}

/// Half precision has only even numbers beyond 2048, and every part's sum is 2049.
#[test]
fn half_precision_loses_nothing_between_parts() {
    on_mesh(&[3], |_, mesh| {
        let ones = || Tensor::<1>::ones([3 * 2049], mesh.device()).cast(FloatDType::F16);
        let x = DTensor::distribute_replicated(ones(), mesh, &[S(0)])?;
        let found = x.cumsum(0);
        assert_eq!(found.dtype(), ones().dtype());
        let found = found.full_tensor()?.into_data();
        assert_eq!(found, ones().cumsum(0).into_data());
        Ok(())
    });
}

#[test]
fn integers_accumulate_and_are_found_in_their_own_type() {
    for dtype in [IntDType::I64, IntDType::I32, IntDType::U8] {
        on_mesh(&[2], |_, mesh| {
            let numbers: Vec<i64> = vec![3, 9, 9, 0, 2, 9, 1];
            let full = || {
                Tensor::<1, Int>::from_data(TensorData::new(numbers.clone(), [7]), mesh.device())
                    .cast(dtype)
            };
            let sizes = || DTensor::distribute_replicated(full(), mesh, &[S(0)]);
            assert_eq!(
                sizes()?.cumsum(0).full_tensor()?.into_data(),
                full().cumsum(0).into_data()
            );
            assert_eq!(
                sizes()?.cummax(0).full_tensor()?.into_data(),
                full().cummax(0).into_data()
            );
            assert_eq!(
                sizes()?.argmax(0).full_tensor()?.into_data(),
                full().argmax(0).into_data()
            );
            let (found, expected) = (
                sizes()?.min_dim_with_indices(0),
                full().min_dim_with_indices(0),
            );
            assert_eq!(found.0.full_tensor()?.into_data(), expected.0.into_data());
            assert_eq!(found.1.full_tensor()?.into_data(), expected.1.into_data());
            Ok(())
        });
    }
}

/// Calls and bytes that `run` makes of a `[rows, len]` tensor in single precision: all-gathers
/// forward, reduce-scatters backward, and all others.
fn sent(
    mesh: &DeviceMesh,
    layout: &Layout,
    [rows, len]: [usize; 2],
    run: impl Fn(DTensor<2>) -> DTensor<2>,
) -> Result<[(u64, u64); 3]> {
    let full = super::ramp([rows, len], 1.0, &Device::flex().autodiff()).require_grad();
    let x = DTensor::distribute_replicated_to(full, mesh, layout.clone())?;
    let ledger = mesh.world().ledger();
    ledger.reset();
    let y = RedistributePolicy::Deny.run(|| run(x));
    if y.local().is_tracked() {
        y.to_local().sum().backward();
    }
    let of = |op, phase| (ledger.calls_in(op, phase), ledger.bytes_in(op, phase));
    let known = [
        of(Op::AllGather, Phase::Forward),
        of(Op::ReduceScatter, Phase::Backward),
    ];
    let all = ledger.total(|_| true);
    let others = (
        all.calls - known[0].0 - known[1].0,
        all.bytes - known[0].1 - known[1].1,
    );
    Ok([known[0], known[1], others])
}

/// With `k` parts: a scan sends an element of each, a softmax two, and what is found one and its
/// place. All mesh dimensions that cut are gathered over at once. The whole is 4096 elements a row.
#[test]
fn a_few_elements_of_each_part_are_sent_and_nothing_else() {
    const SHAPE: [usize; 2] = [3, 4096];
    for (mesh, parts) in [(&[4][..], 4), (&[3], 3), (&[2, 3], 6)] {
        let placements: Vec<_> = mesh.iter().map(|_| S(1)).collect();
        let layout = Layout::new(mesh, &placements).unwrap();
        let slots = SHAPE[0] as u64 * parts;
        on_mesh(mesh, |_, mesh| {
            let found = 4 + Tensor::<1, Int>::zeros([1], mesh.device()).dtype().size() as u64;
            let there_and_back = |bytes| [(1, bytes), (1, bytes), (0, 0)];
            let there = |bytes| [(1, bytes), (0, 0), (0, 0)];
            assert_eq!(
                sent(mesh, &layout, SHAPE, |x| x.cumsum(1))?,
                there_and_back(4 * slots)
            );
            assert_eq!(
                sent(mesh, &layout, SHAPE, |x| x.cummin(1))?,
                there_and_back(4 * slots)
            );
            use burn_dtensor::dtensor::ops::activation::{log_softmax, softmax};
            assert_eq!(
                sent(mesh, &layout, SHAPE, |x| softmax(x, 1))?,
                there_and_back(8 * slots)
            );
            assert_eq!(
                sent(mesh, &layout, SHAPE, |x| log_softmax(x, 1))?,
                there_and_back(8 * slots)
            );
            assert_eq!(
                sent(mesh, &layout, SHAPE, |x| x.max_dim_with_indices(1).0)?,
                there(found * slots)
            );
            assert_eq!(
                sent(mesh, &layout, SHAPE, |x| x.argmin(1).float())?,
                there(found * slots)
            );
            assert_eq!(
                sent(mesh, &layout, SHAPE, |x| x.topk(5, 1))?,
                there(5 * found * slots)
            );
            assert_eq!(
                sent(mesh, &layout, SHAPE, |x| x.argtopk(5, 1).float())?,
                there(5 * found * slots)
            );
            Ok(())
        });
    }
}

/// Fewer than a part has, more, and nearly all: layouts do not depend on lengths.
#[test]
fn the_largest_are_on_every_rank_however_they_were_found() {
    on_mesh(&[2], |_, mesh| {
        for (len, k) in [(100, 3), (100, 49), (100, 60), (7, 6)] {
            let x = DTensor::<2>::ones([4, len], mesh, &[S(1)], mesh.device())?;
            let ledger = mesh.world().ledger();
            ledger.reset();
            assert_eq!(x.topk(k, 1).placements(), [R], "{k} of {len}");
            assert_eq!(
                (ledger.calls(Op::AllGather), ledger.total(|_| true).calls),
                (1, 1),
                "{k} of {len}"
            );
            assert!(
                ledger.bytes(Op::AllGather) <= 4 * len as u64 * 4,
                "{k} of {len}"
            );
        }
        Ok(())
    });
}

/// What has to be whole to be sorted goes to another cut, and each rank sends a part.
#[test]
fn sorting_a_sharded_dimension_exchanges_shards() {
    on_mesh(&[4], |_, mesh| {
        let ledger = mesh.world().ledger();
        let sorts: [fn(DTensor<2>) -> DTensor<2>; 3] =
            [|x| x.sort(1), |x| x.argsort(1).float(), |x| x.median(1)];
        for sort in sorts {
            let x = DTensor::<2>::ones([8, 1024], mesh, &[S(1)], mesh.device())?;
            ledger.reset();
            assert_eq!(sort(x).placements(), [S(0)]);
            assert_eq!(
                (ledger.calls(Op::AllToAll), ledger.bytes(Op::AllToAll)),
                (1, 8 * 1024 / 4 * 4)
            );
            assert_eq!(ledger.total(|_| true).calls, 1);
        }
        Ok(())
    });
}

/// Cutting the rows as well would make what is sent less, and the gradient's way back longer.
#[test]
fn what_is_sharded_along_the_dimension_alone_stays_so() {
    on_mesh(&[2, 2], |_, mesh| {
        for placements in [[S(1), R], [R, S(1)], [S(0), S(1)]] {
            let x = || DTensor::<2>::ones([4, 64], mesh, &placements, mesh.device());
            assert_eq!(x()?.cumsum(1).placements(), placements);
            assert_eq!(
                burn_dtensor::dtensor::ops::activation::softmax(x()?, 1).placements(),
                placements
            );
            let found = placements.map(|own| if own == S(1) { R } else { own });
            assert_eq!(x()?.argmax(1).placements(), found);
            assert_eq!(x()?.topk(2, 1).placements(), found);
        }
        Ok(())
    });
}
