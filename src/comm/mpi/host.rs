//! Finds out, once at the start, which processes can use [shared memory](crate::memory::shared_memory) with each
//! other.

use super::error::MpiError;
use super::library::Library;
use crate::comm::launcher::ProcessRank;
use crate::memory::shared_memory::{SWITCH, SharedMemoryHandle, SharedMemoryPool};

/// Number of bytes of an encoded address; all are 0 if there is none.
const LEN: usize = 16;

/// Returns, for each process, true if this process can share memory with it.
///
/// # Collective
/// All processes must call it: each creates a block, and tries to map those of all others.
pub(super) fn shared_with(library: &Library, place: ProcessRank) -> Result<Box<[bool]>, MpiError> {
    let ProcessRank { processes, here } = place;
    let commons = SharedMemoryPool::default();
    let is_on = std::env::var_os(SWITCH).is_none_or(|value| value != "0");
    // The block must exist until all processes have tried.
    let own = is_on.then(|| commons.take(1, 1)).flatten();
    let all = library.all_gather(&own.as_ref().map_or([0; LEN], |own| written(own.address())))?;
    let is_seen = |bytes: &[u8]| {
        u8::from(own.is_some() && read(bytes).is_some_and(|at| SharedMemoryPool::default().map(at, 1).is_ok()))
    };
    let seen: Vec<u8> = all.chunks_exact(LEN).map(is_seen).collect();
    let seen = library.all_gather(&seen)?;
    drop(own);
    Ok((0..processes).map(|other| share(&seen, processes, here, other)).collect())
}

/// Returns true if two of the processes can map each other's memory and can do so with the same other processes.
/// The second condition makes sharing an equivalence relation.
fn share(seen: &[u8], processes: usize, one: usize, other: usize) -> bool {
    let see_each_other = |a: usize, b: usize| seen[a * processes + b] * seen[b * processes + a] == 1;
    see_each_other(one, other) && (0..processes).all(|third| see_each_other(one, third) == see_each_other(other, third))
}

fn written(address: SharedMemoryHandle) -> [u8; LEN] {
    let mut bytes = [0; LEN];
    bytes[..4].copy_from_slice(&address.process.to_le_bytes());
    bytes[4..8].copy_from_slice(&address.file.to_le_bytes());
    bytes[8..].copy_from_slice(&address.number.to_le_bytes());
    bytes
}

/// Decodes an address. Returns `None` if there is none, because no process has the number 0.
fn read(bytes: &[u8]) -> Option<SharedMemoryHandle> {
    let (process, rest) = bytes.split_first_chunk()?;
    let (file, rest) = rest.split_first_chunk()?;
    let (process, file) = (u32::from_le_bytes(*process), u32::from_le_bytes(*file));
    let number = u64::from_le_bytes(rest.try_into().ok()?);
    (process > 0).then_some(SharedMemoryHandle { process, file, number })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_they_were_written() {
        let address = SharedMemoryHandle { process: 1 << 31, file: 7, number: u64::MAX - 1 };
        assert_eq!(read(&written(address)), Some(address));
        assert_eq!(read(&[0; LEN]), None);
    }

    #[test]
    fn who_shares_with_one_shares_with_all_that_do() {
        // 0 and 1 see each other. 2 sees 3, which does not see 2. 4, 5 and 6 see each other, except 4 and 6.
        let pairs = [(0, 1), (1, 0), (2, 3), (4, 5), (5, 4), (5, 6), (6, 5)];
        let all = (0..7).flat_map(|a| (0..7).map(move |b| (a, b)));
        let seen: Vec<u8> = all.map(|(a, b)| u8::from(a == b || pairs.contains(&(a, b)))).collect();
        let shared = |one| (0..7).filter(|other| share(&seen, 7, one, *other)).collect::<Vec<_>>();
        let alone = |one| vec![one];
        let all = [vec![0, 1], vec![0, 1], alone(2), alone(3), alone(4), alone(5), alone(6)];
        assert_eq!((0..7).map(shared).collect::<Vec<_>>(), all);
    }
}
