//! One case on one rank.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn_dtensor::comm::{CallTotals, Phase};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::placement::Layout;
use burn_dtensor::{Error, Result};

use super::call::{Call, Feed};
use super::file::{Case, Operator, Values};

/// What one rank made of a case.
pub struct Outcome {
    pub outs: Vec<Out>,
    /// Local gradients of the inputs; `None` for those that have none.
    pub grads: Vec<Option<Values>>,
    /// The operator's collectives in forward.
    pub sent: CallTotals,
}

/// One output, as one rank has it.
pub struct Out {
    pub layout: Layout,
    pub local: Values,
    pub full: Values,
}

/// Runs a case. A panic of an operator, which every rank shares, is an error of the case.
pub fn run(
    mesh: &DeviceMesh,
    operator: &Operator,
    case: &Case,
    call: &dyn Call,
) -> Result<Outcome> {
    catch_unwind(AssertUnwindSafe(|| try_run(mesh, operator, case, call))).unwrap_or_else(
        |payload| {
            let payload = match payload.downcast::<Error>() {
                Ok(error) => return Err(*error),
                Err(payload) => payload,
            };
            let text = payload
                .downcast_ref::<String>()
                .map(String::as_str)
                .or(payload.downcast_ref::<&str>().copied());
            Err(Error::other(text.unwrap_or("a panic without words")))
        },
    )
}

fn try_run(
    mesh: &DeviceMesh,
    operator: &Operator,
    case: &Case,
    call: &dyn Call,
) -> Result<Outcome> {
    let mut feed = Feed::new(mesh, operator, case);
    let outputs = call.call(&mut feed)?;
    let sent = mesh
        .world()
        .ledger()
        .total(|key| key.phase == Phase::Forward);
    let (mut outs, mut loss) = (vec![], None);
    for (k, output) in outputs.iter().enumerate() {
        let (layout, local) = output.local();
        let (full, term) = output.full(k)?;
        outs.push(Out {
            layout,
            local,
            full,
        });
        loss = match (loss, term) {
            (Some(loss), Some(term)) => Some(loss + term),
            (loss, term) => loss.or(term),
        };
    }
    let grads = match loss.map(|loss| loss.backward()) {
        Some(grads) => feed
            .gradients
            .iter()
            .map(|read| read.as_ref().map(|read| read(&grads)))
            .collect(),
        None => vec![],
    };
    Ok(Outcome { outs, grads, sent })
}
