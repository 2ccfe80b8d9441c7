//! What a step of experts sends, held to closed formulas.

use burn::optim::GradientsParams;
use burn_dtensor::comm::{LedgerEntry, Op, Phase};
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::net::{DIM, EXPERTS, Net, Read, blocks, distribute};
use crate::fsdp::support::on_device;
use crate::parallel::support::data_rank;

/// Bytes of a block's norm and router.
const OTHERS: u64 = 4 * (2 * DIM + DIM * EXPERTS + EXPERTS) as u64;
/// Bytes of one expert.
const EXPERT: u64 = 4 * 2 * 5 * 7;

#[test]
fn experts_move_within_the_ranks_that_have_the_same_and_all_else_over_all() {
    let model = Net::new();
    MeshTest::new([2, 3], ["efsdp", "ep"]).run(|mesh| {
        let (device, (rank, _)) = (mesh.device().clone().autodiff(), data_rank(mesh));
        let config = blocks().with_reshard_after_forward(ReshardAfterForward::Always);
        let net = distribute(on_device(&model, &device), mesh, config)?;
        let ledger = mesh.world().ledger();
        ledger.reset();
        let loss = net.loss_on(0, rank, Read::Placed, &device);
        let _ = GradientsParams::from_grads(loss.backward(), &net);
        let block: Vec<_> = ledger
            .recent()
            .into_iter()
            .filter(|entry| &*entry.label == "blocks.1")
            .collect();
        let sent = |op, phase| {
            let of = |entry: &&LedgerEntry| (entry.op, entry.phase) == (op, phase);
            let mut sent: Vec<_> = block
                .iter()
                .filter(of)
                .map(|entry| (entry.group_size, entry.bytes))
                .collect();
            sent.sort_unstable();
            sent
        };
        // One expert a rank along `ep`; two ranks hold it.
        for phase in [Phase::Forward, Phase::Backward] {
            assert_eq!(
                sent(Op::AllGather, phase),
                [(2, EXPERT), (6, OTHERS)],
                "{phase:?}"
            );
        }
        // With it a row of flags for every rank: one number for each of the parameters.
        assert_eq!(
            sent(Op::ReduceScatter, Phase::Backward),
            [(2, EXPERT + 4 * 2 * 2), (6, OTHERS + 4 * 4 * 6)]
        );
        assert_eq!(block.len(), 6, "{block:?}");
        // Tokens go to their experts and come back, twice in a block, over the ranks along `ep`.
        for (phase, calls) in [(Phase::Forward, 4), (Phase::Backward, 4)] {
            assert_eq!(ledger.calls_in(Op::AllToAll, phase), calls, "{phase:?}");
        }
        let mut grads = GradientsParams::from_grads(
            net.loss_on(1, rank, Read::Placed, &device).backward(),
            &net,
        );
        let before = ledger.calls(Op::AllReduce);
        clip_grad_norm(&net, &mut grads, 1.0, NormType::L2)?;
        assert_eq!(
            ledger.calls(Op::AllReduce) - before,
            3,
            "over all, over `efsdp` and over `ep`"
        );
        Ok(())
    });
}
