//! Groups of some of the ranks.

use std::sync::Arc;

use burn::tensor::Tensor;
use burn_dtensor::Error;
use burn_dtensor::comm::{Communicator, ReduceOp};

use super::cases::run;
use super::plain::into_data;

#[test]
fn rows_and_columns_of_a_mesh_work_at_once() {
    run(8, |world| {
        let (row, column) = (world.rank() / 4, world.rank() % 4);
        let rows = world.group(&(0..4).map(|c| row * 4 + c).collect::<Vec<_>>())?;
        let columns = world.group(&[column, 4 + column])?;
        let sum = |comm: &Arc<dyn Communicator>| -> Result<f32, Error> {
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
