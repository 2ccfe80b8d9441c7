//! Groups of some of the ranks.

use std::time::Duration;

use burn::tensor::Tensor;
use burn_dtensor::Error;
use burn_dtensor::comm::{CommError, Communicator, Launch, ReduceOp, launch};

use super::{into_data, run};

#[test]
fn rows_and_columns_of_a_mesh_work_at_once() {
    run(8, |world| {
        let (row, column) = (world.rank() / 4, world.rank() % 4);
        let rows = world.group(&(0..4).map(|c| row * 4 + c).collect::<Vec<_>>())?;
        let columns = world.group(&[column, 4 + column])?;
        let sum = |comm: &Communicator| -> Result<f32, Error> {
            let tensor =
                Tensor::<1>::full([3], world.rank() as f32, world.device()).into_dispatch();
            let sum = comm
                .all_reduce("sum".into(), vec![tensor], ReduceOp::Sum)
                .wait()?
                .remove(0);
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
fn the_librarys_own_names_are_refused() {
    let error = launch(Launch::threads(2), |world| {
        world
            .all()
            .duplicate("burn_dtensor::reduced")
            .barrier("own".into())
            .wait()?;
        Ok(())
    });
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("names that begin with \"burn_dtensor::\" are this crate's own"),
        "{error}"
    );
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

#[test]
fn enumerated_groups_are_checked_and_hold_who_they_name() {
    run(4, |world| {
        let of = |groups: &[&[usize]]| world.subgroup(groups.iter().map(|ranks| ranks.to_vec()));
        let group = of(&[&[2, 0], &[3]])?;
        let ranks = group.as_ref().map(|group| group.group().ranks().to_vec());
        assert_eq!(
            ranks,
            [Some(vec![2, 0]), None, Some(vec![2, 0]), Some(vec![3])][world.rank()]
        );
        if let Some(group) = group {
            assert_eq!(
                group.group().group_rank_of(world.rank()),
                Some(group.group().rank())
            );
            assert_eq!(
                (
                    group.group().group_rank_of(1),
                    group.group().ranks()[group.group().rank()]
                ),
                (None, world.rank())
            );
        }
        let problem = |groups: &[&[usize]]| of(groups).unwrap_err().to_string();
        assert!(problem(&[&[0, 4]]).contains("rank 4 is outside a world of 4 ranks"));
        assert!(
            problem(&[&[0, 1], &[1, 2]])
                .contains("rank 1 is named in [0, 1] too. Name each rank at most once")
        );
        assert!(problem(&[&[3, 3]]).contains("rank 3 is named twice"));
        assert!(problem(&[&[0], &[]]).contains("it has no ranks"));
        Ok(())
    });
}

#[test]
fn groups_of_one_size_are_of_adjacent_ranks() {
    run(6, |world| {
        for (size, first) in [
            (1, world.rank()),
            (2, world.rank() / 2 * 2),
            (3, world.rank() / 3 * 3),
            (6, 0),
        ] {
            let group = world.subgroup_of_size(size)?;
            assert!(
                group
                    .group()
                    .ranks()
                    .iter()
                    .copied()
                    .eq(first..first + size)
            );
        }
        for size in [0, 4, 5, 12] {
            let problem = world.subgroup_of_size(size).unwrap_err().to_string();
            assert!(
                problem.contains(&format!("cannot split 6 ranks into groups of {size}")),
                "{problem}"
            );
        }
        Ok(())
    });
}

#[test]
fn a_split_is_by_color_in_the_order_of_keys_and_waits_as_long_as_its_parent() {
    run(5, |world| {
        let parent = world.group(&[4, 3, 2, 1, 0])?;
        let (color, key) = [
            (Some(7), 1),
            (Some(7), 0),
            (None, 0),
            (Some(0), 0),
            (Some(7), 1),
        ][world.rank()];
        let part = world.split(&parent, color, key)?;
        let ranks = part.as_ref().map(|part| part.group().ranks().to_vec());
        // Of one key, in the parent's order: 4 before 0.
        let expected = [
            Some(vec![1, 4, 0]),
            Some(vec![1, 4, 0]),
            None,
            Some(vec![3]),
            Some(vec![1, 4, 0]),
        ];
        assert_eq!(ranks, expected[world.rank()]);
        Ok(())
    });
    // Long enough for the split itself, on a machine that does other things.
    let deadline = Duration::from_secs(2);
    let late = launch(Launch::threads(3), |world| {
        let parent = world.all().with_deadline(deadline);
        let part = world
            .split(&parent, Some(world.rank() / 2), 0)?
            .expect("every rank gave a color");
        match world.rank() {
            0 => Ok(part.barrier("part".into()).wait()?),
            // Until the world ends.
            _ => Ok(world
                .all()
                .receive("for good".into(), None, None, 0)
                .wait()
                .map(drop)?),
        }
    });
    let cause = late.unwrap_err().cause;
    assert!(
        matches!(cause, Error::Comm(CommError::DeadlineExceeded { rank: 0, deadline: found, .. }) if found == deadline)
    );
}
