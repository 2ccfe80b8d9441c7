//! Digests that are sent with signatures which the other processes already know.

use std::sync::Arc;

use burn_dtensor::comm::{Call, Digests, Launch, ReplicatedValue, World, launch};
use burn_dtensor::testing::LoopbackJob;

/// Returns a call whose signature is long enough to be sent only once.
fn long(label: &str) -> Call {
    Call::new(label).with_names((0..100).map(|at| format!("a path of parameter {at}").into()))
}

/// Adds the digest of one weight in step `step` to `call`.
fn holding(call: Call, step: u64) -> Call {
    let (names, values): (Arc<[_]>, Arc<[_]>) = (["a".into()].into(), [Some(step << 32)].into());
    call.with_digests(vec![Digests {
        of: ReplicatedValue::Weight,
        step,
        names,
        values,
    }])
}

/// Calls one signature with new digests more often than the number of signatures that a process
/// remembers.
#[test]
fn a_print_with_new_digests_is_said_once() {
    let job = LoopbackJob::new(2, 22);
    let ends = job.run(|process, processes| {
        launch(Launch::on_backend(processes.backend(1)), |world: &World| {
            let all = world.all();
            let mut last = job.sent(process);
            let mut bytes = |call: Call| {
                all.barrier(call).wait()?;
                let before = std::mem::replace(&mut last, job.sent(process));
                Ok::<_, burn_dtensor::Error>(last - before)
            };
            let first = bytes(holding(long("a"), 1))?;
            let rest: Vec<_> = (2..1500)
                .map(|step| bytes(holding(long("a"), step)))
                .collect::<Result<_, _>>()?;
            let others = [bytes(long("b"))?, bytes(long("b"))?];
            Ok((first, rest.into_iter().max(), others))
        })
    });
    for (rank, (first, most, others)) in ends
        .into_iter()
        .flat_map(|end| end.unwrap_or_else(|error| panic!("{error}")))
    {
        assert!(
            first > 2000 && others[0] > 2000,
            "rank {rank}: {first}, {others:?}"
        );
        assert!(
            most.is_some_and(|most| most < 70) && others[1] < 50,
            "rank {rank}: {most:?}, {others:?}"
        );
    }
}
