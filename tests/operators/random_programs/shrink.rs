//! Making a failing program small.

use burn::tensor::Device;
use burn_dtensor::placement::{Layout, Placement};

use super::program::{Leaf, Program};
use super::value::{Data, Value};

/// The most programs tried on the way.
const TRIES: usize = 400;

/// A smaller program that fails too, and how.
pub fn shrink(
    program: Program,
    failure: String,
    fails: impl Fn(&Program) -> Option<String>,
) -> (Program, String) {
    let (mut smallest, mut how, mut tries) = (program, failure, 0);
    'again: loop {
        for smaller in candidates(&smallest) {
            tries += 1;
            if tries > TRIES {
                return (smallest, how);
            }
            if let Some(failure) = fails(&smaller) {
                (smallest, how) = (smaller, failure);
                continue 'again;
            }
        }
        return (smallest, how);
    }
}

fn candidates(program: &Program) -> Vec<Program> {
    let mut all = Vec::new();
    let mut add = |change: &dyn Fn(&mut Program)| {
        let mut smaller = program.clone();
        change(&mut smaller);
        smaller.prune();
        all.push(smaller);
    };
    // The first steps become inputs, many at once, then one by one; then the last ones go.
    let values = values(program);
    for count in [program.steps.len() / 2, program.steps.len() / 4, 1] {
        for at in (0..program.steps.len()).step_by(count.max(1)) {
            let until = (at + count).min(program.steps.len());
            if count > 0 && until - at < program.steps.len() {
                add(&|smaller| replace(smaller, at..until, &values));
                add(&|smaller| drop_steps(smaller, at..until));
            }
        }
    }
    if program.rounds > 1 {
        add(&|smaller| smaller.rounds = 1);
    }
    if program.watches {
        add(&|smaller| smaller.watches = false);
    }
    if program.probes {
        add(&|smaller| smaller.probes = false);
    }
    if program.moves {
        add(&|smaller| smaller.moves = false);
    }
    for (at, leaf) in program.leaves.iter().enumerate() {
        for mesh_dim in 0..program.mesh.len() {
            let mut placements = leaf.layout.placements().to_vec();
            if placements[mesh_dim] != Placement::Replicate {
                placements[mesh_dim] = Placement::Replicate;
                let layout = Layout::new(&program.mesh, &placements).expect("the others commuted");
                add(&|smaller| smaller.leaves[at].layout = layout.clone());
            }
        }
    }
    all
}

/// Drops steps and all that follows from them.
fn drop_steps(program: &mut Program, steps: std::ops::Range<usize>) {
    let mut gone: Vec<usize> = program
        .steps
        .drain(steps)
        .flat_map(|step| step.results)
        .collect();
    program.steps.retain(|step| {
        let stays = !step.operands.iter().any(|operand| gone.contains(operand));
        if !stays {
            gone.extend(&step.results);
        }
        stays
    });
}

/// Makes inputs of the steps' results.
fn replace(program: &mut Program, steps: std::ops::Range<usize>, values: &[(usize, Data)]) {
    let results: Vec<usize> = program
        .steps
        .drain(steps)
        .flat_map(|step| step.results)
        .collect();
    let layout = Layout::replicate(&program.mesh).expect("a mesh has ranks");
    for (id, data) in values.iter().filter(|(id, _)| results.contains(id)) {
        let wide = Data {
            dtype: program.profile.wide().dtype(data.kind),
            ..data.clone()
        };
        program.leaves.push(Leaf {
            id: *id,
            data: wide,
            layout: layout.clone(),
        });
    }
}

/// Every result on ordinary tensors.
fn values(program: &Program) -> Vec<(usize, Data)> {
    let device = Device::flex();
    let typed = |leaf: &Leaf| Data {
        dtype: program.profile.dtype(leaf.data.kind),
        ..leaf.data.clone()
    };
    let leaves: Vec<Value> = program
        .leaves
        .iter()
        .map(|leaf| typed(leaf).tensor(&device.clone().autodiff()))
        .collect();
    let mut all = Vec::new();
    let ran = program.run(
        &leaves,
        |step, operands| (step.plain)(operands),
        |step, results| {
            for (&id, value) in step.results.iter().zip(results) {
                all.push((id, value.full()?));
            }
            Ok(())
        },
    );
    ran.expect("nothing is sent");
    all
}
