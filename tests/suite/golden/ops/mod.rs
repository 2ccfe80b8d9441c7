//! Golden kind 3: operators on sharded inputs, forward and backward.
//!
//! Each operator of the file is written with DTensors in [`table`], as a user of burn would write
//! it. Every case then runs on thread ranks; its full values, the local values where the outputs
//! are placed as torch places them, and the local gradients of its inputs are held to the
//! unsharded values.
//!
//! Where torch refuses, crashes or disagrees with itself, ours still has to be right: a *win*.
//! What torch has no value for in any case is held to the local operator, on replicated inputs.

mod call;
mod file;
mod judge;
mod run;
mod summary;
mod table;

use std::collections::{BTreeMap, BTreeSet};

use burn_dtensor::Result;
use burn_dtensor::comm::{Launch, launch};
use burn_dtensor::mesh::DeviceMesh;

use call::Row;
use file::{Case, Golden, Operator};
use judge::{Truth, judge};
use run::{Outcome, run};
use summary::Summary;

use crate::launched;

/// An operator and one of its cases.
type Job<'a> = (&'a str, &'a Operator, &'a Case);

/// What all ranks made of each job of one mesh shape.
fn run_all(mesh: &[usize], jobs: &[Job<'_>]) -> Vec<Vec<Result<Outcome>>> {
    let ranks = launch(Launch::threads(mesh.iter().product()), |world| {
        let mesh = DeviceMesh::new(
            world,
            mesh,
            (0..mesh.len())
                .map(|dim| format!("d{dim}"))
                .collect::<Vec<_>>(),
        )?;
        let table: BTreeMap<&str, _> = table::rows().into_iter().collect();
        Ok(jobs
            .iter()
            .map(|(name, op, case)| run(&mesh, op, case, &*table[name]))
            .collect::<Vec<_>>())
    });
    ranks
        .map(launched::values)
        .unwrap_or_else(|error| panic!("mesh {mesh:?}: {error}"))
}

/// The operator without sharding.
fn truth(operator: &Operator, unsharded: Option<&Result<Outcome>>) -> Result<Truth, String> {
    let (outs, grads) = (operator.truth(), operator.gradients());
    let (no_outs, no_grads) = (outs.is_empty(), grads.is_empty());
    let Some(local) = unsharded else {
        return Ok(Truth {
            outs,
            grads,
            no_outs,
            no_grads,
        });
    };
    let local = local
        .as_ref()
        .map_err(|error| format!("on replicated inputs: {error}"))?;
    Ok(Truth {
        outs: if no_outs {
            local.outs.iter().map(|out| out.full.clone()).collect()
        } else {
            outs
        },
        grads: if no_grads { local.grads.clone() } else { grads },
        no_outs,
        no_grads,
    })
}

#[test]
fn golden_operators() {
    let golden: Golden = super::read("3_ops.json");
    let table: BTreeSet<&str> = table::rows().iter().map(|(name, _): &Row| *name).collect();
    let mut summary = Summary::default();
    let mut operators: Vec<(&str, &Operator)> = vec![];
    for (name, operator) in &golden.ops {
        match table.contains(name.as_str()) {
            true => operators.push((name, operator)),
            false => summary.problem(name, "is not in the table"),
        }
    }
    // Where torch has no values, the local operator has, on replicated inputs.
    let incomplete =
        |operator: &Operator| operator.truth().is_empty() || operator.gradients().is_empty();
    let unsharded =
        |operator: &Operator| Case::unsharded(&operator.cases[0].mesh, operator.inputs.len());
    let unsharded: BTreeMap<&str, Case> = operators
        .iter()
        .filter(|(_, op)| incomplete(op))
        .map(|(name, op)| (*name, unsharded(op)))
        .collect();

    let mut by_mesh: BTreeMap<&[usize], Vec<Job<'_>>> = BTreeMap::new();
    for &(name, operator) in &operators {
        for case in unsharded.get(name).into_iter().chain(&operator.cases) {
            by_mesh
                .entry(&case.mesh)
                .or_default()
                .push((name, operator, case));
        }
    }
    let ranks: Vec<_> = by_mesh
        .iter()
        .map(|(mesh, jobs)| run_all(mesh, jobs))
        .collect();
    let all = || {
        by_mesh.values().zip(&ranks).flat_map(|(jobs, ranks)| {
            jobs.iter()
                .enumerate()
                .map(move |(at, job)| (job, at, ranks))
        })
    };
    let is_local = |(name, _, case): &Job<'_>| {
        unsharded
            .get(name)
            .is_some_and(|local| std::ptr::eq(local, *case))
    };
    let locals: BTreeMap<&str, _> = all()
        .filter(|(job, ..)| is_local(job))
        .map(|(job, at, ranks)| (job.0, &ranks[0][at]))
        .collect();
    let truths: BTreeMap<&str, _> = operators
        .iter()
        .map(|&(name, operator)| (name, truth(operator, locals.get(name).copied())))
        .collect();
    for (job @ &(name, operator, case), at, ranks) in all().filter(|(job, ..)| !is_local(job)) {
        let outcomes: Vec<_> = ranks.iter().map(|rank| &rank[at]).collect();
        let verdict = match &truths[name] {
            Ok(truth) => judge(operator, case, truth, &outcomes),
            Err(problem) => Err(problem.clone()),
        };
        match verdict {
            Ok(verdict) => summary.count(job, &verdict),
            Err(problem) => summary.problem(
                &format!("{name} on {:?}, {:?}", case.mesh, case.in_pl),
                &problem,
            ),
        }
    }
    println!("{summary}");
    let totals = summary.check();
    assert_eq!(
        totals.forward,
        golden
            .ops
            .values()
            .map(|operator| operator.cases.len())
            .sum::<usize>()
    );
    // Gradients are compared wherever torch has them.
    let with_gradients = golden
        .ops
        .values()
        .filter(|operator| !operator.gradients().is_empty());
    assert!(
        totals.gradients
            >= with_gradients
                .map(|operator| operator.cases.len())
                .sum::<usize>()
    );
    assert!(
        totals.calls <= totals.calls_of_torch,
        "{} collectives, torch {}",
        totals.calls,
        totals.calls_of_torch
    );
}
