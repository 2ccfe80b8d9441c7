//! Every collective, against brute force over plain vectors.

use burn::backend::TensorMetadata;
use burn::tensor::{DType, Shape};
use burn_dtensor::comm::{Call, Op, ReduceOp, Sharded, TensorMeta};

use super::cases::{DTYPES, cases, cuts, held, on_groups, piece, run, shapes};
use super::plain::{Plain, into_data};

#[test]
fn all_gather_restores_the_whole() {
    on_groups(|world, comm| {
        for (shape, dim, dtype) in cases() {
            for cut in cuts(shape[dim], comm.group().size()) {
                let whole = Plain::sample(&shape, 0, dtype);
                let piece = piece(&whole, dim, cut.clone(), dtype, comm, world.device());
                let gathered = comm.all_gather(Call::default(), vec![piece]).wait()?.remove(0);
                assert_eq!(gathered.dtype(), dtype);
                assert_eq!(Plain::of(gathered), whole, "{shape:?} dim {dim} {cut:?} {dtype:?}");
            }
        }
        Ok(())
    });
}

#[test]
fn a_list_of_any_dtypes_dimensions_and_cuts_is_gathered_at_once() {
    on_groups(|world, comm| {
        for ragged in [0, 1] {
            let whole = |(index, (shape, dim, dtype)): (usize, (Vec<usize>, usize, DType))| {
                (Plain::sample(&shape, index, dtype), dim, dtype)
            };
            let wholes: Vec<_> = cases().enumerate().map(whole).collect();
            let shard = |(whole, dim, dtype): &(Plain, usize, DType)| {
                let cut = cuts(whole.shape[*dim], comm.group().size())[ragged].clone();
                piece(whole, *dim, cut, *dtype, comm, world.device())
            };
            let gathered = comm.all_gather(Call::default(), wholes.iter().map(shard).collect()).wait()?;
            assert_eq!(gathered.len(), wholes.len());
            for (gathered, (whole, dim, dtype)) in gathered.into_iter().zip(&wholes) {
                assert_eq!(gathered.dtype(), *dtype);
                assert_eq!(Plain::of(gathered), *whole, "dim {dim} {dtype:?}");
            }
        }
        Ok(())
    });
}

#[test]
fn reduce_scatter_gives_each_rank_its_part_of_the_sum() {
    on_groups(|world, comm| {
        let (size, rank) = (comm.group().size(), comm.group().rank());
        for (shape, dim, dtype) in cases() {
            for op in [ReduceOp::Sum, ReduceOp::Min, ReduceOp::Max] {
                if dtype.is_bool() && op == ReduceOp::Sum {
                    continue;
                }
                for cut in cuts(shape[dim], size) {
                    let all: Vec<_> = (0..size).map(|rank| Plain::sample(&shape, rank, dtype)).collect();
                    let tensor = all[rank].tensor(dtype, world.device());
                    let whole = Sharded { tensor, dim, cut: cut.clone() };
                    let part = comm.reduce_scatter(Call::default(), vec![whole], op).wait()?.remove(0);
                    let expected = Plain::reduced(&all, op, dtype).narrow(dim, held(&cut, size, rank));
                    assert_eq!(part.dtype(), dtype);
                    assert_eq!(Plain::of(part), expected, "{shape:?} dim {dim} {cut:?} {dtype:?} {op:?}");
                }
            }
        }
        Ok(())
    });
}

#[test]
fn all_reduce_gives_every_rank_the_same() {
    on_groups(|world, comm| {
        let (size, rank) = (comm.group().size(), comm.group().rank());
        let big = vec![vec![40_003], vec![150, 300]];
        for shape in shapes().into_iter().chain(big) {
            for dtype in DTYPES {
                for op in [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product] {
                    let no_sum = matches!(op, ReduceOp::Sum | ReduceOp::Avg) && dtype.is_bool();
                    let rounded = op == ReduceOp::Avg && dtype.is_float();
                    let large = op == ReduceOp::Product && size > 4;
                    if no_sum || rounded || large {
                        continue;
                    }
                    let all: Vec<_> = (0..size).map(|rank| Plain::sample(&shape, rank, dtype)).collect();
                    let tensor = all[rank].tensor(dtype, world.device());
                    let reduced = comm.all_reduce(Call::default(), vec![tensor], op).wait()?.remove(0);
                    assert_eq!(reduced.dtype(), dtype);
                    assert_eq!(Plain::of(reduced), Plain::reduced(&all, op, dtype), "{shape:?} {dtype:?} {op:?}");
                }
            }
        }
        Ok(())
    });
}

#[test]
fn the_average_is_the_sum_over_the_number_of_ranks() {
    on_groups(|world, comm| {
        let (size, rank) = (comm.group().size(), comm.group().rank());
        for dtype in [DType::F32, DType::F64] {
            let tensor = Plain::sample(&[33], rank, dtype).tensor(dtype, world.device());
            let average = comm.all_reduce(Call::default(), vec![tensor], ReduceOp::Avg).wait()?.remove(0);
            let sums = (0..33).map(|i| (0..size).map(|r| Plain::sample(&[33], r, dtype).values[i]).sum::<i64>());
            let expected: Vec<f64> = match dtype {
                DType::F32 => sums.map(|sum| (sum as f32 / size as f32) as f64).collect(),
                _ => sums.map(|sum| sum as f64 / size as f64).collect(),
            };
            assert_eq!(into_data(average).iter::<f64>().collect::<Vec<_>>(), expected);
        }
        Ok(())
    });
}

#[test]
fn all_to_all_moves_the_cut_to_another_dimension() {
    on_groups(|world, comm| {
        let (size, rank) = (comm.group().size(), comm.group().rank());
        for (shape, dim, dtype) in cases() {
            for to_dim in (0..shape.len()).filter(|to_dim| *to_dim != dim) {
                let pairs = cuts(shape[dim], size).map(|cut| cuts(shape[to_dim], size).map(|to| (cut.clone(), to)));
                for (cut, to_cut) in pairs.into_iter().flatten() {
                    let whole = Plain::sample(&shape, 0, dtype);
                    let piece = piece(&whole, dim, cut.clone(), dtype, comm, world.device());
                    let recut = comm.all_to_all(Call::default(), piece, to_dim, to_cut.clone()).wait()?;
                    let expected = whole.narrow(to_dim, held(&to_cut, size, rank));
                    assert_eq!(Plain::of(recut), expected, "{shape:?} {dim} {cut:?} -> {to_dim} {to_cut:?} {dtype:?}");
                }
            }
        }
        Ok(())
    });
}

#[test]
fn all_to_all_list_gives_every_rank_what_each_has_for_it() {
    on_groups(|world, comm| {
        let (size, rank) = (comm.group().size(), comm.group().rank());
        for dtype in DTYPES {
            // As many rows as the pair says, down to none, and of some pairs no tensor at all.
            let part = |from: usize, to: usize| {
                let rows = (from + 2 * to) % 4;
                let shape = if (from + to).is_multiple_of(2) { vec![rows, 3] } else { vec![rows] };
                ((from * to + from) % 3 < 2).then(|| Plain::sample(&shape, from * size + to, dtype))
            };
            let parts = (0..size).map(|to| part(rank, to).map(|part| part.tensor(dtype, world.device())));
            let meta = |part: Plain| TensorMeta { shape: Shape::from(part.shape), dtype };
            let metas = (0..size).map(|from| part(from, rank).map(meta));
            let got = comm.all_to_all_list(Call::default(), parts.collect(), metas.collect()).wait()?;
            assert!(got.iter().flatten().all(|part| part.dtype() == dtype));
            let got: Vec<_> = got.into_iter().map(|part| part.map(Plain::of)).collect();
            assert_eq!(got, (0..size).map(|from| part(from, rank)).collect::<Vec<_>>(), "{dtype:?}");
        }
        Ok(())
    });
}

#[test]
fn broadcast_and_scatter_take_the_roots_tensors() {
    on_groups(|world, comm| {
        let (size, rank) = (comm.group().size(), comm.group().rank());
        for (shape, dim, dtype) in cases() {
            for root in 0..size {
                let whole = Plain::sample(&shape, root, dtype);
                let metas = vec![TensorMeta { shape: Shape::from(shape.clone()), dtype }];
                let tensors = || (rank == root).then(|| vec![whole.tensor(dtype, world.device())]);
                let copy = comm.broadcast(Call::default(), tensors(), metas.clone(), root).wait()?.remove(0);
                assert_eq!(Plain::of(copy), whole);
                for cut in cuts(shape[dim], size) {
                    let sent = comm.scatter(Call::default(), tensors(), metas.clone(), vec![(dim, cut.clone())], root);
                    let expected = whole.narrow(dim, held(&cut, size, rank));
                    assert_eq!(Plain::of(sent.wait()?.remove(0)), expected, "{shape:?} dim {dim} {cut:?}");
                }
            }
        }
        Ok(())
    });
}

#[test]
fn several_tensors_travel_together() {
    run(4, |world| {
        let comm = world.all();
        let wholes: Vec<_> = cases().map(|(shape, dim, dtype)| (Plain::sample(&shape, 1, dtype), dim, dtype)).collect();
        // Cut in turn into chunks and raggedly.
        let pieces = wholes.iter().enumerate().map(|(at, (whole, dim, dtype))| {
            let cut = cuts(whole.shape[*dim], comm.group().size())[at % 2].clone();
            piece(whole, *dim, cut, *dtype, &comm, world.device())
        });
        let gathered = comm.all_gather("unit".into(), pieces.collect()).wait()?;
        assert!(gathered.into_iter().map(Plain::of).eq(wholes.into_iter().map(|(whole, ..)| whole)));
        assert_eq!(world.ledger().calls(Op::AllGather), 1);
        Ok(())
    });
}
