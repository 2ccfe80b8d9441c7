//! Collectives of serde values.

use std::collections::BTreeMap;

use super::scope::TestGroup;
use crate::Result;
use crate::comm::Call;

type Object = (String, BTreeMap<u8, Vec<f64>>, Option<bool>);

/// Returns an object whose serialized length depends on the rank. It may be empty, and it contains
/// an infinity.
fn object(scope: &TestGroup, rank: usize) -> Object {
    (
        "r\u{e4}nk ".repeat(scope.length(rank % 5)),
        (0..rank as u8 % 4)
            .map(|key| (key, vec![f64::from(key) / 3.0, f64::INFINITY, -0.0]))
            .collect(),
        [None, Some(true), Some(false)][rank % 3],
    )
}

/// Checks that objects are gathered, broadcast, scattered and sent.
pub(super) fn objects(scope: &TestGroup) -> Result<()> {
    let size = scope.size();
    let rank = scope.rank();
    let comm = &scope.comm;
    let call = || Call::new("object");
    let all: Vec<_> = (0..size).map(|rank| object(scope, rank)).collect();
    scope.same(
        comm.all_gather_object(call(), &all[rank])?,
        all.clone(),
        || "all_gather_object".into(),
    );
    for root in 0..size.min(9) {
        let own = comm.broadcast_object(call(), (rank == root).then_some(&all[root]), root)?;
        scope.same(own, all[root].clone(), || {
            format!("broadcast_object of {root}")
        });
        let gathered = comm.gather_object(call(), &all[rank], root)?;
        scope.same(gathered, (rank == root).then(|| all.clone()), || {
            format!("gather_object on {root}")
        });
        let own = comm.scatter_object(call(), (rank == root).then_some(&all[..]), root)?;
        scope.same(own, all[rank].clone(), || {
            format!("scatter_object of {root}")
        });
    }
    comm.send_object(call(), &all[rank], (rank + 1) % size, 3)
        .wait()?;
    let last = (rank + size - 1) % size;
    let (from, own) = comm.receive_object::<Object>(call(), last, 3)?;
    scope.same((from, own), (last, all[last].clone()), || {
        "receive_object".into()
    });
    Ok(())
}
