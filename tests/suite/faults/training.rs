//! Faults in the middle of a training step: the other ranks are told, and have the parameters and
//! the optimizer that they had before it.
//!
//! Layers are units, and a fault is between unit 0 and unit 1. Where ranks differ in the loss, all
//! of them run the same:
//!
//! ```text
//! x ─> 0 ──┬──> 1 ─> 2 ─> loss            x ─> 0 ─> 1 ─┬─> 2 ─> loss
//!        calls                                         └─> 3 ─> loss, or not
//! ```

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Tensor};
use burn_dtensor::comm::{Launch, World};
use burn_dtensor::fsdp::{FullyShard, fully_shard, unit};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::{Error, Result};

use super::TABLE;
use super::fault::{Fault, second_and_third};
use super::folder::Folder;
use super::operation::{Arguments, Operation};
use super::told::{Cells, Told};
use crate::fsdp::hook::in_backward;
use crate::fsdp::support::{on_device, tensor, values};
use crate::own_process::own_process;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Forward,
    Backward,
}

/// What a rank is at fault in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum In {
    /// Collectives that all ranks' programs call between two units.
    Calls,
    /// The order of units: in forward that in which they run, in backward that of the loss's graph.
    Units,
    /// Nothing that the others call: it calls a collective by itself, between two units.
    Nothing,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cell(In, Place, Fault);

/// In place of a unit another one runs, or is in the loss.
const OTHER_UNIT: Fault = Fault::OtherOperation;

/// Units, and calls that no other rank makes.
const ROWS: [(Cell, Told); 10] = [
    (Cell(In::Units, Place::Forward, OTHER_UNIT), Told::Mismatch),
    (
        Cell(In::Units, Place::Forward, Fault::OtherOrder),
        Told::Mismatch,
    ),
    (
        Cell(In::Units, Place::Forward, Fault::OneMore),
        Told::Mismatch,
    ),
    (
        Cell(In::Units, Place::Forward, Fault::OneLess),
        Told::Mismatch,
    ),
    (Cell(In::Units, Place::Backward, OTHER_UNIT), Told::Mismatch),
    (
        Cell(In::Units, Place::Backward, Fault::OtherOrder),
        Told::Mismatch,
    ),
    (
        Cell(In::Units, Place::Backward, Fault::OneMore),
        Told::Mismatch,
    ),
    (
        Cell(In::Units, Place::Backward, Fault::OneLess),
        Told::Mismatch,
    ),
    // Met by the gather of the next unit.
    (
        Cell(In::Nothing, Place::Forward, Fault::OneMore),
        Told::Mismatch,
    ),
    // Backward's reductions are a sequence of their own: the others wait in one of these.
    (
        Cell(In::Nothing, Place::Backward, Fault::OneMore),
        Told::Deadlock,
    ),
];

/// Of calls that all ranks make the table is that of calls anywhere.
fn rows() -> impl Iterator<Item = (Cell, Told)> {
    let places = [Place::Forward, Place::Backward].into_iter();
    let of_calls = places.flat_map(|place| {
        TABLE
            .iter()
            .map(move |(fault, told)| (Cell(In::Calls, place, *fault), *told))
    });
    of_calls.chain(ROWS)
}

/// Unwinds a rank's program, which then returns.
struct Returns;

const WIDTH: usize = 3;

type Layers = Vec<Linear>;

fn layers(device: &Device) -> Layers {
    device.seed(7);
    let layers: Layers = (0..4)
        .map(|_| LinearConfig::new(WIDTH, WIDTH).init(device))
        .collect();
    // Draw now, on one thread.
    let _ = values(&layers, None);
    layers
}

/// A training that a rank takes part in.
struct Training {
    world: World,
    layers: Layers,
    optim: ModuleOptimizer,
}

/// The bits of a rank's parameters, and what the optimizer remembers of them.
type State = (BTreeMap<String, Vec<u32>>, Vec<u8>);

impl Training {
    fn new(world: &World, model: &Layers) -> Result<Self> {
        let mesh = DeviceMesh::new(world, [world.size()], ["shard"])?;
        let model = on_device(model, &world.device().clone().autodiff());
        let layers = fully_shard(model, &mesh, FullyShard::new().with_units(["*"]))?;
        Ok(Self {
            world: world.clone(),
            layers,
            optim: AdamWConfig::new().init(),
        })
    }

    fn state(&self) -> Result<State> {
        let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect();
        let values = values(&self.layers, None)
            .into_iter()
            .map(|(path, values)| (path, bits(values)));
        Ok((values.collect(), self.optim.into_bytes()?.to_vec()))
    }

    /// A step. One that fails leaves what was there.
    fn step(&mut self, cell: Option<Cell>) -> Result<()> {
        let before = self.state()?;
        let x = tensor(
            self.world.rank() as u64,
            [2, WIDTH],
            &self.world.device().clone().autodiff(),
        );
        let grads = Error::catch(|| {
            let loss = match cell {
                Some(Cell(In::Units, Place::Backward, fault)) => self.forward_of_all(x, fault),
                _ => self.forward(x, cell)?,
            };
            Ok(GradientsParams::from_grads(loss.backward(), &self.layers))
        });
        match grads {
            Ok(grads) => self.layers = self.optim.step(1e-2, self.layers.clone(), grads),
            Err(error) => {
                assert_eq!(
                    self.state()?,
                    before,
                    "a step that failed has changed something: {error}"
                );
                return Err(error);
            }
        }
        Ok(())
    }

    fn is_culprit(&self) -> bool {
        self.world.rank() + 1 == self.world.size()
    }

    fn run(&self, at: usize, x: Tensor<2>) -> Tensor<2> {
        unit(&self.layers[at], x, |layer, x| layer.forward(x).tanh())
    }

    /// Where a rank may call otherwise, or run other units.
    fn forward(&self, x: Tensor<2>, cell: Option<Cell>) -> Result<Tensor<1>> {
        let fault = cell.map(|cell| cell.2).filter(|_| self.is_culprit());
        let mut units = &[1, 2][..];
        let mut x = self.run(0, x);
        match cell {
            None => {}
            Some(Cell(In::Units, ..)) => {
                units = match fault {
                    Some(OTHER_UNIT) => &[3, 2],
                    Some(Fault::OtherOrder) => &[2, 1],
                    Some(Fault::OneMore) => &[1, 1, 2],
                    Some(Fault::OneLess) => &[2],
                    _ => units,
                }
            }
            Some(Cell(of, Place::Forward, _)) => calls(&self.world, of, fault)?,
            Some(Cell(of, Place::Backward, _)) => {
                let world = self.world.clone();
                x = in_backward(x, move || {
                    calls(&world, of, fault).unwrap_or_else(|error| error.unwind())
                });
            }
        }
        Ok(units.iter().fold(x, |x, at| self.run(*at, x)).sum())
    }

    /// Where a rank's loss may be another.
    fn forward_of_all(&self, x: Tensor<2>, fault: Fault) -> Tensor<1> {
        let first = self.run(0, x.clone());
        let second = match fault {
            // Its loss depends on unit 0 not only through unit 1.
            Fault::OtherOrder if self.is_culprit() => self.run(1, x) + first.tanh(),
            _ => self.run(1, first),
        };
        let [third, fourth] = [2, 3].map(|at| self.run(at, second.clone()).sum());
        match (fault, self.is_culprit()) {
            (OTHER_UNIT, true) => fourth,
            (Fault::OneMore, true) | (Fault::OneLess, false) | (Fault::OtherOrder, _) => {
                third + fourth
            }
            _ => third,
        }
    }
}

/// What a rank calls between two units, beside what these do.
fn calls(world: &World, of: In, fault: Option<Fault>) -> Result<()> {
    let all = world.all();
    if of == In::Nothing {
        return match fault {
            Some(_) => Ok(Operation::AllReduce.call(world, &all, Arguments::new("alone"))?),
            None => Ok(()),
        };
    }
    if second_and_third(world, &all, Operation::AllReduce, fault)?.is_break() {
        resume_unwind(Box::new(Returns));
    }
    Ok(())
}

/// A step that all ranks make alike, and one in which the last is at fault.
fn program(world: &World, model: &Layers, cell: Cell) -> Result<()> {
    let mut training = Training::new(world, model)?;
    training.step(None)?;
    match catch_unwind(AssertUnwindSafe(|| training.step(Some(cell)))) {
        Ok(step) => step,
        Err(payload) if payload.is::<Returns>() => Ok(()),
        Err(payload) => resume_unwind(payload),
    }
}

/// Every cell of this place, on threads.
fn every_cell_in(place: Place) {
    let model = layers(&Device::flex());
    for ranks in [2, 3, 8] {
        let (folder, mut cells) = (
            Folder::here(&format!("{place:?}-{ranks}")),
            Cells::default(),
        );
        for (cell, told) in rows().filter(|(cell, _)| cell.1 == place) {
            let at = (Launch::threads(ranks), &folder, ranks);
            cells.run(at, &[told], &format!("{cell:?}"), |world| {
                program(world, &model, cell)
            });
        }
        println!("{place:?} on {ranks} threads: {cells}");
        assert_eq!(cells.count, 15);
    }
}

#[test]
fn every_fault_in_forward_is_told() {
    every_cell_in(Place::Forward);
}

#[test]
fn every_fault_in_backward_is_told() {
    own_process("faults::training::every_fault_in_backward_is_told", || {
        every_cell_in(Place::Backward)
    });
}
