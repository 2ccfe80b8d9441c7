//! Lists of DTensors without a module, stepped on meshes and on one device: equal to the bit.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{Tensor, TensorData};
use burn_dtensor::comm::Op;
use burn_dtensor::optim::{DTensorOptimizer, FullOptimizerState};
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::alone::{LR, PARAMS, Trained, cases, gradient, start, trained};

use Placement::{Replicate as R, Shard as S};

const MESHES: [(&[usize], &[Placement]); 6] = [
    (&[1], &[S(0)]),
    (&[2], &[S(0)]),
    (&[3], &[S(1)]),
    (&[4], &[S(0)]),
    (&[2, 2], &[R, S(1)]),
    (&[2, 3], &[S(1), S(0)]),
];

fn on_mesh<T: Send>(shape: &[usize], body: impl Fn(&DeviceMesh) -> Result<T> + Sync) -> Vec<T> {
    MeshTest::new(shape, ["a", "b"][..shape.len()].to_vec()).run(body)
}

fn shard(data: TensorData, mesh: &DeviceMesh, placements: &[Placement]) -> Result<DTensor<2>> {
    let complete = Tensor::<2>::from_data(data, &mesh.device().clone().autodiff());
    DTensor::distribute_replicated(complete.require_grad(), mesh, placements)
}

fn params(
    start: &[TensorData],
    mesh: &DeviceMesh,
    placements: &[Placement],
) -> Result<Vec<DTensor<2>>> {
    start
        .iter()
        .map(|data| shard(data.clone(), mesh, placements))
        .collect()
}

fn train(
    optim: &mut DTensorOptimizer,
    params: Vec<DTensor<2>>,
    steps: Range<usize>,
) -> Result<Vec<DTensor<2>>> {
    let stepped = params.into_iter().enumerate().map(|(index, mut param)| {
        for step in steps.clone() {
            let grad = shard(gradient(index, step), param.mesh(), param.placements())?.detach();
            param = optim.step(LR, PARAMS[index].0, param, grad)?;
        }
        Ok(param)
    });
    stepped.collect()
}

fn full(params: &[DTensor<2>]) -> Result<Vec<TensorData>> {
    params
        .iter()
        .map(|param| Ok(param.clone().full_tensor()?.into_data()))
        .collect()
}

fn specs(params: &[DTensor<2>]) -> BTreeMap<String, Arc<DTensorSpec>> {
    PARAMS
        .iter()
        .zip(params)
        .map(|((path, _), param)| ((*path).to_owned(), param.spec().clone()))
        .collect()
}

fn starts() -> Vec<TensorData> {
    (0..PARAMS.len()).map(start).collect()
}

/// Invariants 1 and 2.
#[test]
fn every_optimizer_steps_as_on_one_device_and_keeps_its_state_as_the_parameters_lie() {
    for case in cases() {
        let name = case.name;
        let expected = trained(&*(case.make)().1, 0..4);
        assert_ne!(expected.params, starts(), "{name} steps");
        for (shape, placements) in MESHES {
            on_mesh(shape, |mesh| {
                let mut optim = (case.make)().0;
                let sent = || mesh.world().ledger().total(|_| true).calls;
                let begun = params(&starts(), mesh, placements)?;
                let before = sent();
                let stepped = train(&mut optim, begun, 0..4)?;
                let state = optim.state()?;
                if !case.is_full {
                    assert_eq!(sent(), before, "{name} sends nothing");
                }
                for (param, (path, shape)) in stepped.iter().zip(PARAMS) {
                    assert!(param.local().is_require_grad(), "a leaf again");
                    assert_eq!(param.placements(), placements);
                    for (tensor, kept) in state
                        .tensors()
                        .filter(|(tensor, _)| tensor.starts_with(&format!("{path}.")))
                    {
                        let as_it_lies = if kept.spec().shape().to_vec() == shape {
                            placements
                        } else {
                            &vec![R; mesh.ndim()]
                        };
                        assert_eq!(kept.spec().placements(), as_it_lies, "{tensor}");
                    }
                }
                let found = Trained {
                    params: full(&stepped)?,
                    state: state.full()?,
                };
                assert_eq!(found, expected, "{name} on {shape:?} as {placements:?}");
                Ok(())
            });
        }
    }
}

#[test]
fn a_parameter_that_is_not_stepped_has_no_state() {
    on_mesh(&[2], |mesh| {
        let mut optim = (cases().remove(2).make)().0;
        let params = params(&starts(), mesh, &[S(0)])?;
        let grad = shard(gradient(1, 0), mesh, &[S(0)])?.detach();
        optim.step(LR, PARAMS[1].0, params[1].clone(), grad)?;
        assert!(optim.state()?.paths().eq([PARAMS[1].0]));
        Ok(())
    });
}

#[test]
fn names_are_paths_and_burns_fields() {
    on_mesh(&[2], |mesh| {
        let mut optim = (cases().remove(4).make)().0;
        train(&mut optim, params(&starts(), mesh, &[S(0)])?, 0..3)?;
        let state = optim.state()?;
        let of = |path| ["moment_1", "moment_2"].map(|field| format!("{path}.momentum.{field}"));
        assert!(
            state
                .tensors()
                .map(|(name, _)| name)
                .eq(PARAMS.iter().flat_map(|(path, _)| of(path)))
        );
        assert_eq!(
            usize::try_from(state.scalar("head.momentum.time").expect("it counts")),
            Ok(3)
        );
        assert_eq!(state.scalars().count(), PARAMS.len());
        // One path begins as the other.
        assert_eq!(
            state
                .tensor::<2>("blocks.0.up.momentum.moment_1")
                .expect("there")
                .dims(),
            [5, 4]
        );
        assert_eq!(
            state
                .tensor::<2>("blocks.0.upper.momentum.moment_1")
                .expect("there")
                .dims(),
            [3, 7]
        );
        assert!(
            state.tensor::<1>("head.momentum.moment_1").is_none(),
            "it is a matrix"
        );
        assert!(state.tensor::<2>("head.momentum.velocity").is_none());
        Ok(())
    });
}

/// `w.bias` is a parameter, not a field of `w`.
#[test]
fn of_paths_with_one_prefix_the_longest_counts() {
    on_mesh(&[2], |mesh| {
        let of = |shape: [usize; 2]| {
            Ok::<_, Error>(
                DTensor::<2>::zeros(shape, mesh, &[S(0)], mesh.device())?
                    .spec()
                    .clone(),
            )
        };
        let specs = BTreeMap::from([
            ("w".to_owned(), of([4, 4])?),
            ("w.bias".to_owned(), of([2, 2])?),
        ]);
        let full = FullOptimizerState {
            tensors: BTreeMap::from([
                ("w.moment".into(), start(0)),
                ("w.bias.moment".into(), start(2)),
            ]),
            scalars: BTreeMap::from([("w.bias.time".into(), 1_usize.into())]),
        };
        let state = full.distribute(specs)?;
        assert!(state.paths().eq(["w", "w.bias"]));
        assert_eq!(
            state.tensor::<2>("w.bias.moment").expect("there").dims(),
            PARAMS[2].1
        );
        assert_eq!(state.full()?, full);
        Ok(())
    });
}

/// Saved after three steps on four ranks, and gone on with on every mesh: as if nothing had
/// happened.
#[test]
fn a_saved_state_goes_on_on_any_mesh() {
    for case in cases() {
        let expected = trained(&*(case.make)().1, 0..6);
        let saved = on_mesh(&[4], |mesh| {
            let mut optim = (case.make)().0;
            let params = train(&mut optim, params(&starts(), mesh, &[S(0)])?, 0..3)?;
            Ok((full(&params)?, optim.state()?.full()?.into_bytes()?))
        });
        for (shape, placements) in MESHES {
            on_mesh(shape, |mesh| {
                let (values, bytes) = &saved[0];
                let params = params(values, mesh, placements)?;
                let mut optim = (case.make)().0;
                let state =
                    FullOptimizerState::from_bytes(bytes.clone())?.distribute(specs(&params))?;
                optim.load(state)?;
                let stepped = train(&mut optim, params, 3..6)?;
                let found = Trained {
                    params: full(&stepped)?,
                    state: optim.state()?.full()?,
                };
                assert_eq!(
                    found, expected,
                    "{} on {shape:?} as {placements:?}",
                    case.name
                );
                Ok(())
            });
        }
    }
}

/// On one mesh, and on to another of the same ranks.
#[test]
fn a_state_follows_its_parameters_to_another_layout_and_mesh() {
    for case in cases() {
        let expected = trained(&*(case.make)().1, 0..6);
        on_mesh(&[2, 2], |mesh| {
            let mut optim = (case.make)().0;
            let mut params = train(&mut optim, params(&starts(), mesh, &[S(0), R])?, 0..2)?;
            params = params
                .into_iter()
                .map(|param| Ok(param.redistribute(&[R, S(1)])?.detach()))
                .collect::<Result<_>>()?;
            let moved = optim.state()?.redistribute(specs(&params))?;
            for (name, tensor) in moved.tensors().filter(|(_, tensor)| {
                PARAMS
                    .iter()
                    .any(|(_, shape)| tensor.spec().shape().to_vec() == shape)
            }) {
                assert_eq!(tensor.spec().placements(), [R, S(1)], "{name}");
            }
            optim.load(moved)?;
            params = train(&mut optim, params, 2..4)?;
            let flat = DeviceMesh::new(mesh.world(), [4], ["all"])?;
            params = full(&params)?
                .into_iter()
                .map(|data| shard(data, &flat, &[S(0)]))
                .collect::<Result<_>>()?;
            let moved = optim.state()?.redistribute(specs(&params))?;
            optim.load(moved)?;
            params = train(&mut optim, params, 4..6)?;
            let found = Trained {
                params: full(&params)?,
                state: optim.state()?.full()?,
            };
            assert_eq!(found, expected, "{}", case.name);
            Ok(())
        });
    }
}

/// Parameter and gradient; of the result each rank takes its part.
#[test]
fn an_optimizer_of_full_parameters_gathers_each_twice() {
    let lamb = cases()
        .into_iter()
        .find(|case| case.name == "Lamb")
        .expect("listed");
    on_mesh(&[3], |mesh| {
        let mut optim = (lamb.make)().0;
        let begun = params(&starts(), mesh, &[S(0)])?;
        mesh.world().ledger().reset();
        train(&mut optim, begun, 0..2)?;
        optim.state()?;
        let ledger = mesh.world().ledger();
        assert_eq!(ledger.calls(Op::AllGather), 2 * 2 * PARAMS.len() as u64);
        assert_eq!(ledger.total(|_| true).calls, ledger.calls(Op::AllGather));
        Ok(())
    });
}
