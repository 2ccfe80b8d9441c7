//! Groups of some of the ranks.

use burn::tensor::{DType, Tensor};
use burn_dtensor::Error;
use burn_dtensor::comm::{Call, Communicator, Op, ReduceOp, Sharded};
use burn_dtensor::placement::Cut;

use super::cases::{held, run};
use super::plain::{Plain, into_data};

#[test]
fn rows_and_columns_of_a_mesh_work_at_once() {
    run(8, |world| {
        let (row, column) = (world.rank() / 4, world.rank() % 4);
        let rows = world.group(&(0..4).map(|c| row * 4 + c).collect::<Vec<_>>())?;
        let columns = world.group(&[column, 4 + column])?;
        let sum = |comm: &Communicator| -> Result<f32, Error> {
            let tensor = Tensor::<1>::full([3], world.rank() as f32, world.device()).into_dispatch();
            let sum = comm.all_reduce("sum".into(), vec![tensor], ReduceOp::Sum).wait()?.remove(0);
            Ok(into_data(sum).try_to_vec::<f32>().unwrap()[0])
        };
        for _ in 0..50 {
            assert_eq!(sum(&rows)?, (16 * row + 6) as f32);
            assert_eq!(sum(&columns)?, (2 * column + 4) as f32);
        }
        assert_eq!(rows.group().rank(), column);
        Ok(())
    });
}

#[test]
fn groups_are_checked() {
    run(3, |world| {
        let problem = |ranks: &[usize]| world.group(ranks).unwrap_err().to_string();
        assert!(problem(&[0, 1, 2, 3]).contains("rank 3 is outside a world of 3 ranks"));
        assert!(problem(&[0, 1, 0, 2]).contains("rank 0 is named twice"));
        assert!(problem(&[]).contains("only its members"));
        assert!(problem(&[(world.rank() + 1) % 3]).contains("only its members"));
        Ok(())
    });
}

/// Lists of tensors, some empty: each as if it went alone, and pieces in the order of the group.
#[test]
fn some_ranks_in_any_order_reduce_lists_and_gather_in_that_order() {
    const SHAPES: [&[usize]; 4] = [&[17], &[5, 3], &[0, 4], &[3, 4, 5]];
    const RANKS: [usize; 3] = [3, 0, 2];
    run(4, |world| {
        let Some(place) = RANKS.iter().position(|&rank| rank == world.rank()) else { return Ok(()) };
        let comm = world.group(&RANKS)?;
        assert_eq!((comm.group().rank(), comm.group().size()), (place, 3));
        for dtype in [DType::F32, DType::I64] {
            let samples = |shape: &&[usize]| RANKS.map(|rank| Plain::sample(shape, rank, dtype));
            let lists: Vec<[Plain; 3]> = SHAPES.iter().map(samples).collect();
            for op in [ReduceOp::Sum, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max] {
                let own = lists.iter().map(|list| list[place].tensor(dtype, world.device())).collect();
                let reduced = comm.all_reduce(Call::default(), own, op).wait()?;
                let expected = lists.iter().map(|list| Plain::reduced(list, op, dtype));
                assert!(reduced.into_iter().map(Plain::of).eq(expected), "{op:?} {dtype:?}");
            }
            let whole = |shape: &&[usize]| Plain::sample(shape, 0, dtype);
            let pieces = SHAPES.iter().map(whole).map(|whole| {
                let cut = Cut::Chunks(whole.shape[0]);
                let piece = whole.narrow(0, held(&cut, 3, place));
                Sharded { tensor: piece.tensor(dtype, world.device()), dim: 0, cut }
            });
            let gathered = comm.all_gather(Call::default(), pieces.collect()).wait()?;
            assert!(gathered.into_iter().map(Plain::of).eq(SHAPES.iter().map(whole)), "{dtype:?}");
        }
        assert_eq!((world.ledger().calls(Op::AllReduce), world.ledger().calls(Op::AllGather)), (8, 2));
        Ok(())
    });
}
