//! What is sent, counted and traced; held to the rank's ledger, which counts by itself.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::tensor::Tensor;
use burn::tensor::ops::ConvOptions;
use burn_dtensor::comm::{CallTotals, Op, Phase};
use burn_dtensor::debug::{TracedCollective, TracedLayoutChange, trace_comm};
use burn_dtensor::dtensor::ops::module::conv1d;
use burn_dtensor::dtensor::{CrossMeshRedistribute, RedistributeOptions};
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::Mlp;
use Placement::{Replicate as R, Shard as S};

/// Operator, line and pass.
fn origin(changed: &TracedLayoutChange) -> (&'static str, u32, Phase) {
    assert!(
        changed.origin.at.file().ends_with("debug/watched.rs"),
        "{changed}"
    );
    (
        changed.origin.operator,
        changed.origin.at.line(),
        changed.phase,
    )
}

#[test]
fn a_change_of_layout_names_the_line_that_asked_for_it() {
    MeshTest::new([2], ["tp"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let leaf = |placement| Ok::<_, Error>(DTensor::<2>::ones([4, 6], mesh, &[placement], &device)?.require_grad());
        let (a, b) = (leaf(S(1))?, leaf(S(0))?);
        let first = line!() + 2;
        let (full, watched) = trace_comm(|| -> Result<_> {
            let both = a.clone() + b.clone();
            let full = both.redistribute(&[R])?;
            Ok(RedistributeOptions::to(&[S(0)]).run(full)?.to_local())
        });
        let changes = watched.changes();
        let named: Vec<_> = changes.iter().map(origin).collect();
        let forward = Phase::Forward;
        assert_eq!(
            named,
            [("add", first, forward), ("redistribute", first + 1, forward), ("RedistributeOptions", first + 2, forward)]
        );
        assert_eq!(changes[1].from.placements(), changes[0].to.placements());
        let bytes = 4 * 6 * 4;
        let of = |changed: &TracedLayoutChange| changed.collectives.clone();
        assert_eq!(of(&changes[0]), [TracedCollective { op: Op::AllToAll, ranks: 2, bytes: bytes / 2 }]);
        assert_eq!(of(&changes[1]), [TracedCollective { op: Op::AllGather, ranks: 2, bytes }]);
        assert_eq!((of(&changes[2]), changes[2].bytes()), (vec![], 0), "a slice");
        let (_, watched) = trace_comm(|| full.expect("no rank fails").sum().backward());
        let back: Vec<_> = watched.changes().iter().map(origin).collect();
        let backward = Phase::Backward;
        assert_eq!(
            back,
            [("RedistributeOptions", first + 2, backward), ("redistribute", first + 1, backward), ("add", first, backward)]
        );
        let text = watched.changes()[0].to_string();
        let line = format!(
            "debug/watched.rs:{} RedistributeOptions, backward: [4, 6] [S(0)] -> [R]: all_gather of 2 ranks, {bytes} bytes",
            first + 2
        );
        assert!(text.ends_with(&line), "{text}");
        Ok(())
    });
}

#[test]
fn a_sum_of_gradients_and_another_mesh_are_changes_too() {
    MeshTest::new([2, 2], ["dp", "tp"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let x = DTensor::<2>::ones([4, 6], mesh, &[R, R], &device)?.require_grad();
        let (_, watched) = trace_comm(|| -> Result<_> { Ok(x.vary(&[0, 1])?.sum().backward()) });
        let changes = watched.changes();
        assert_eq!(changes[1].summed, ["dp", "tp"]);
        assert_eq!(
            changes[1].collectives,
            [TracedCollective {
                op: Op::AllReduce,
                ranks: 4,
                bytes: 96
            }]
        );
        assert!(
            changes[1]
                .to_string()
                .contains("[R, R], summed over dp, tp: all_reduce of 4 ranks"),
            "{}",
            changes[1]
        );
        let line = DeviceMesh::new(mesh.world(), [4], ["all"])?;
        let to = Layout::new(&[4], &[S(0)])?;
        let transfer =
            CrossMeshRedistribute::new([4, 6], x.dtype(), (mesh, x.layout().clone()), (&line, to))?;
        let (_, watched) = trace_comm(|| transfer.run(Some(x.clone().detach())));
        assert_eq!(
            watched.changes()[0].origin.operator,
            "CrossMeshRedistribute"
        );
        assert!(
            watched.changes()[0].collectives.is_empty(),
            "everyone has it all"
        );
        Ok(())
    });
}

/// Of a step with units, layers and operators on a mesh of two dimensions.
#[test]
fn counts_are_those_of_the_ledger_by_module_and_operator() {
    MeshTest::new([2, 2], ["dp", "tp"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let mlp = Mlp::on(mesh, &device)?;
        let ledger = mesh.world().ledger();
        ledger.reset();
        let loss = mlp.step(mesh, &device)?;
        let unwatched = ledger.snapshot();
        ledger.reset();
        let (watched_loss, watched) = trace_comm(|| mlp.step(mesh, &device));
        assert_eq!(watched_loss?.to_bits(), loss.to_bits());
        assert_eq!(ledger.snapshot(), unwatched, "watching sends nothing");
        let counts = watched.counts();
        for (op, phase) in unwatched.iter().map(|(key, _)| (key.op, key.phase)) {
            let counted = counts.total(|row| row.op == op && row.phase == phase);
            assert_eq!(
                counted,
                unwatched.total(|key| key.op == op && key.phase == phase),
                "{op} {phase}\n{counts}"
            );
        }
        // The row-wise product's terms are added up: 5 x 8 floats.
        let of = |module: &str, operator: Option<&str>, op, phase| {
            counts.total(|row| {
                &*row.module == module
                    && row.operator == operator
                    && row.op == op
                    && row.phase == phase
            })
        };
        let style = of("down", Some("style"), Op::AllReduce, Phase::Forward);
        assert_eq!(
            style,
            CallTotals {
                calls: 1,
                bytes: 5 * 8 * 4
            },
            "{counts}"
        );
        // A rank gathers its tensor-parallel half of each unit's weights: of `up` 8 x 12 and 12, of
        // `down` 12 x 8.
        for (unit, bytes) in [("up", (8 * 12 + 12) * 2), ("root", 12 * 8 * 2)] {
            assert_eq!(
                of(unit, None, Op::AllGather, Phase::Forward),
                CallTotals { calls: 1, bytes },
                "{counts}"
            );
            // Beside gradients it carries what ranks have used.
            let reduced = unwatched.total(|key| &*key.label == unit && key.op == Op::ReduceScatter);
            assert_eq!(
                of(unit, None, Op::ReduceScatter, Phase::Backward),
                reduced,
                "{counts}"
            );
            assert!(reduced.calls == 1 && reduced.bytes >= bytes, "{counts}");
        }
        assert_eq!(
            counts.inside("up"),
            counts.total(|row| &*row.module == "up")
        );
        assert_eq!(counts.inside(""), counts.total(|row| row.module.is_empty()));
        Ok(())
    });
}

#[test]
fn json_and_table_say_what_the_rows_say() {
    MeshTest::new([2], ["tp"]).run(|mesh| {
        let x = DTensor::<1>::ones([6], mesh, &[S(0)], mesh.device())?;
        let (_, watched) = trace_comm(|| -> Result<_> {
            x.clone().full_tensor()?;
            x.clone().full_tensor()?;
            mesh.world().barrier("done")
        });
        let counts = watched.counts();
        let json: serde_json::Value = serde_json::from_str(&counts.to_json()).expect("JSON");
        let row = |module, operator, collective, phase, calls, bytes| {
            serde_json::json!({
                "module": module, "operator": operator, "collective": collective,
                "phase": phase, "calls": calls, "bytes": bytes,
            })
        };
        let none: Option<&str> = None;
        let gathered = row("", Some("full_tensor"), "all_gather", "forward", 2, 48);
        let expected = [gathered, row("done", none, "barrier", "other", 1, 0)];
        assert_eq!(
            json,
            serde_json::json!({ "calls": 3, "bytes": 48, "collectives": expected })
        );
        let table = "\
module  operator     collective  phase    calls  bytes
-       full_tensor  all_gather  forward      2     48
done    -            barrier     other        1      0
total                                         3     48";
        assert_eq!(counts.to_string(), table);
        assert!(
            watched.to_string().starts_with(table) && watched.to_string().lines().count() == 6,
            "{watched}"
        );
        Ok(())
    });
}

#[test]
fn a_watch_sees_what_is_its_own() {
    MeshTest::new([2], ["tp"]).run(|mesh| {
        let x = DTensor::<1>::ones([6], mesh, &[S(0)], mesh.device())?;
        let gather = || x.clone().full_tensor().expect("no rank fails");
        let calls = |watched: &burn_dtensor::debug::CommTrace| {
            (
                watched.counts().total(|_| true).calls,
                watched.changes().len(),
            )
        };
        gather();
        let (inner, outer) = trace_comm(|| {
            gather();
            trace_comm(gather).1
        });
        gather();
        assert_eq!((calls(&inner), calls(&outer)), ((1, 1), (2, 2)));
        // One that unwinds leaves nothing behind.
        let unwound = catch_unwind(AssertUnwindSafe(|| {
            trace_comm(|| {
                gather();
                std::panic::resume_unwind(Box::new(()));
            })
        }));
        assert!(unwound.is_err());
        gather();
        assert_eq!(calls(&trace_comm(gather).1), (1, 1));
        assert_eq!(
            calls(&trace_comm(|| Tensor::<1>::ones([1], mesh.device())).1),
            (0, 0)
        );
        Ok(())
    });
}

/// Inside this crate's own layers the line is that of the layer's call.
#[test]
fn a_layer_names_its_module_and_the_line_of_its_call() {
    MeshTest::new([2], ["tp"]).run(|mesh| {
        let mlp = Mlp {
            up: burn::nn::LinearConfig::new(8, 12).init(mesh.device()),
            down: burn::nn::LinearConfig::new(12, 8).init(mesh.device()),
        };
        let plan = Plan::new()
            .with_style("up", Style::colwise())
            .with_style("down", Style::rowwise());
        let mlp = parallelize(mlp, mesh, plan)?;
        let x = DTensor::<2>::ones([5, 8], mesh, &[S(0)], mesh.device())?;
        let up = line!() + 1;
        let (y, watched) = trace_comm(|| mlp.up.forward_dtensor(x.clone()));
        let changes = watched.changes();
        assert_eq!(origin(&changes[0]), ("linear", up, Phase::Forward));
        assert_eq!(changes[0].origin.module.as_deref(), Some("up"));
        let (_, watched) = trace_comm(|| mlp.down.forward_dtensor(y));
        let last = watched.changes().pop().expect("terms are added up");
        assert_eq!(origin(&last), ("style", up + 4, Phase::Forward));
        assert_eq!(last.origin.module.as_deref(), Some("down"));
        let (_, watched) = trace_comm(|| mlp.up.forward_dtensor(x.clone()).full_tensor());
        let modules: Vec<_> = watched
            .changes()
            .iter()
            .map(|change| change.origin.module.clone())
            .collect();
        assert_eq!(
            modules,
            [None],
            "a clone of the input is there, and what is outside of the layer is in none"
        );
        Ok(())
    });
}

/// Halos, and the few elements of each part that go to other ranks.
#[test]
fn what_an_operator_exchanges_by_itself_is_filed_under_it_and_its_module() {
    MeshTest::new([2, 2], ["dp", "tp"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let mlp = Mlp::on(mesh, &device)?;
        let tp = mesh.slice("tp")?;
        let image = DTensor::<3>::ones([1, 2, 8], &tp, &[S(2)], &device)?.require_grad();
        let kernel = DTensor::<3>::ones([2, 2, 3], &tp, &[R], &device)?;
        let x = DTensor::<2>::ones([2, 8], &tp, &[S(1)], &device)?.require_grad();
        let line = line!() + 4;
        let (_, watched) = trace_comm(|| {
            let (sums, found) = unit(&mlp.up, (), |_, ()| {
                let options = ConvOptions::new([1], [1], [1], 1);
                let y = conv1d(image, kernel, None, options).to_local();
                let sums = x.clone().cumsum(1).to_local();
                (y.sum() + sums.sum(), x.argmax(1).to_local())
            });
            sums.backward();
            found
        });
        let all = watched.changes();
        let filed: Vec<_> = all
            .iter()
            .filter(|change| !change.collectives.is_empty())
            .collect();
        let said: Vec<_> = filed
            .iter()
            .map(|change| (origin(change), &change.collectives[..]))
            .collect();
        let sent = |op, bytes| {
            [TracedCollective {
                op,
                ranks: 2,
                bytes,
            }]
        };
        // A row of 2 channels; a total of each of 2 rows and 2 ranks; a value beside a place of 32
        // bits.
        let (halo, totals) = (sent(Op::AllToAllList, 2 * 4), sent(Op::AllGather, 4 * 4));
        let (extrema, scattered) = (
            sent(Op::AllGather, 4 * (4 + 4)),
            sent(Op::ReduceScatter, 4 * 4),
        );
        let expected = [
            (("conv1d", line, Phase::Forward), &halo[..]),
            (("cumsum", line + 1, Phase::Forward), &totals),
            (("argmax", line + 2, Phase::Forward), &extrema),
            (("cumsum", line + 1, Phase::Backward), &scattered),
            (("conv1d", line, Phase::Backward), &halo),
        ];
        let sorted = |mut all: Vec<_>| {
            all.sort_by_key(
                |((_, line, phase), _): &((&str, u32, Phase), &[TracedCollective])| (*phase, *line),
            );
            all
        };
        assert_eq!(sorted(said), sorted(expected.to_vec()));
        assert!(
            filed
                .iter()
                .all(|change| change.origin.module.as_deref() == Some("up")),
            "{watched}"
        );
        let none = watched
            .counts()
            .total(|row| row.operator.is_none() && row.op == Op::AllToAllList);
        assert_eq!(none.calls, 0, "{watched}");
        Ok(())
    });
}
