//! Creation of several groups at a time: from lists, of equal size, or by colour.

use super::{Call, CommError, Communicator, World};
use crate::Result;

impl World {
    /// Returns the group of `groups` that contains this rank, or `None` if no group does. Local;
    /// all ranks must pass the same groups.
    ///
    /// ```
    /// use burn_dtensor::comm::{Launch, launch};
    ///
    /// launch(Launch::threads(5), |world| {
    ///     let group = world.subgroup([vec![0, 1], vec![3, 2]])?;
    ///     assert_eq!(group.map(|group| group.group().rank()), [Some(0), Some(1), Some(1), Some(0), None][world.rank()]);
    ///     Ok(())
    /// })?;
    /// # Ok::<_, burn_dtensor::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`CommError::InvalidGroup`] on every rank if a group is empty, names a rank outside the
    /// world, or if a rank is named twice.
    pub fn subgroup(
        &self,
        groups: impl IntoIterator<Item = Vec<usize>>,
    ) -> Result<Option<Communicator>> {
        let mut named_in: Vec<Option<usize>> = vec![None; self.size()];
        let groups: Vec<_> = groups.into_iter().collect();
        for (at, ranks) in groups.iter().enumerate() {
            let wrong = |problem| CommError::InvalidGroup {
                rank: self.rank(),
                ranks: ranks.clone(),
                problem,
            };
            if ranks.is_empty() {
                return Err(
                    wrong("it has no ranks. List at least one rank in each group".into()).into(),
                );
            }
            for rank in ranks {
                let Some(named) = named_in.get_mut(*rank) else {
                    return Err(wrong(self.outside(*rank)).into());
                };
                if let Some(other) = named.replace(at) {
                    let other = if other == at {
                        "twice".into()
                    } else {
                        format!("in {:?} too", groups[other])
                    };
                    return Err(wrong(format!(
                        "rank {rank} is named {other}. Name each rank at most once"
                    ))
                    .into());
                }
            }
        }
        named_in[self.rank()]
            .map(|at| self.group(&groups[at]))
            .transpose()
    }

    /// Returns the group of `size` adjacent ranks that contains this rank: the first group has
    /// ranks 0 to `size - 1`, and so on. Local.
    ///
    /// # Errors
    /// [`CommError::InvalidGroup`] if `size` does not divide the number of ranks.
    pub fn subgroup_of_size(&self, size: usize) -> Result<Communicator> {
        if size == 0 || !self.size().is_multiple_of(size) {
            let problem = format!(
                "cannot split {} ranks into groups of {size}. Pass a size that divides the number of ranks",
                self.size()
            );
            return Err(CommError::InvalidGroup {
                rank: self.rank(),
                ranks: Vec::new(),
                problem,
            }
            .into());
        }
        let first = self.rank() / size * size;
        self.group(&(first..first + size).collect::<Vec<_>>())
    }

    /// Splits a group: the ranks of `parent` that pass the same `color` form a group, ordered by
    /// `key` and then by their order in `parent`. Ranks that pass `None` are in no group
    /// (`MPI_Comm_split`). The new group has the deadline of `parent`.
    ///
    /// # Collective
    /// Called by all ranks of `parent`.
    ///
    /// # Errors
    /// See [`Communicator`].
    pub fn split(
        &self,
        parent: &Communicator,
        color: Option<usize>,
        key: usize,
    ) -> Result<Option<Communicator>> {
        let own = [usize::from(color.is_some()), color.unwrap_or(0), key];
        let all = parent.all_gather_numbers(Call::new("split"), &own)?;
        let Some(color) = color else { return Ok(None) };
        let mine = all
            .chunks_exact(3)
            .enumerate()
            .filter(|(_, given)| given[..2] == [1, color]);
        let mut places: Vec<_> = mine.map(|(place, given)| (given[2], place)).collect();
        places.sort_unstable();
        let ranks: Vec<_> = places
            .into_iter()
            .map(|(_, place)| parent.group().ranks()[place])
            .collect();
        Ok(Some(self.group(&ranks)?.with_deadline(parent.deadline())))
    }
}
