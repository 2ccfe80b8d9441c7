//! [`TestGroup`]: a group in which a check runs.

use std::cell::Cell;

use burn::tensor::{DType, Device};

use super::TestExtent;
use crate::Result;
use crate::comm::{Communicator, World};
use crate::mesh::DeviceMesh;

/// Number of ranks of a world above which fewer cases are tried.
const LARGE: usize = 16;

/// Factor by which long tensors are longer.
const LONG: usize = 400;

/// A group, as seen by one of its ranks.
pub(super) struct TestGroup {
    pub comm: Communicator,
    /// Group of the same ranks in reverse order.
    pub reversed: Communicator,
    pub device: Device,
    few: bool,
    large: bool,
    long: bool,
    cases: Cell<usize>,
}

impl TestGroup {
    /// Returns every group of a world that contains this rank, in the same order on all ranks.
    pub fn all(world: &World, extent: TestExtent) -> Result<Vec<Self>> {
        let size = world.size();
        let ranks = 0..size;
        let odd_and_even = [0, 1].map(|rest| {
            ranks
                .clone()
                .filter(|rank| rank % 2 == rest)
                .collect::<Vec<_>>()
        });
        let neighbours: Vec<Vec<_>> = (0..size / 2)
            .map(|pair| vec![2 * pair + 1, 2 * pair])
            .collect();
        let mut comms = vec![world.all()];
        if (2..=LARGE).contains(&size) {
            comms.push(world.group(&ranks.rev().collect::<Vec<_>>())?);
        }
        if (3..=LARGE).contains(&size) {
            comms.extend(world.subgroup(odd_and_even)?);
            comms.extend(world.subgroup(neighbours)?);
        }
        if size > 3 && size.is_multiple_of(2) {
            let mesh = DeviceMesh::new(world, [2, size / 2], ["rows", "columns"])?;
            comms.extend([mesh.communicator(0)?.clone(), mesh.communicator(1)?.clone()]);
        }
        let scope = |comm: Communicator| {
            let reversed = world.group(
                &comm
                    .group()
                    .ranks()
                    .iter()
                    .rev()
                    .copied()
                    .collect::<Vec<_>>(),
            )?;
            let TestExtent { long, brief } = extent;
            let large = size > LARGE;
            let few = brief || large;
            Ok(Self {
                comm,
                reversed,
                device: world.device().clone(),
                few,
                large,
                long,
                cases: Cell::new(0),
            })
        };
        comms.into_iter().map(scope).collect()
    }

    pub fn size(&self) -> usize {
        self.comm.group().size()
    }

    /// Returns the group rank of this rank.
    pub fn rank(&self) -> usize {
        self.comm.group().rank()
    }

    /// Returns true if fewer cases are tried, either by request or because the world has many
    /// ranks.
    pub fn has_few(&self) -> bool {
        self.few
    }

    /// Returns true if the world has many ranks.
    pub fn is_large(&self) -> bool {
        self.large
    }

    /// Returns true if tensors are long.
    pub fn is_long(&self) -> bool {
        self.long
    }

    /// Returns the length of a dimension that has `len` rows without long tensors.
    pub fn length(&self, len: usize) -> usize {
        if self.long { len * LONG } else { len }
    }

    pub fn cases(&self) -> usize {
        self.cases.get()
    }

    /// Counts a case. Panics with its description if `got` differs from `expected`.
    #[track_caller]
    pub fn same<T: PartialEq + std::fmt::Debug>(
        &self,
        got: T,
        expected: T,
        case: impl FnOnce() -> String,
    ) {
        self.cases.set(self.cases.get() + 1);
        assert!(
            got == expected,
            "{}: got {got:?}, expected {expected:?}",
            case()
        );
    }

    /// Returns true if sums of samples over the group are exact in `dtype`.
    pub fn sums_are_exact(&self, dtype: DType) -> bool {
        self.size() <= 31 || !matches!(dtype, DType::I8 | DType::U8 | DType::BF16)
    }
}
