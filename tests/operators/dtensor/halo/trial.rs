//! A trial of an operator: on whole tensors, and with its input cut.

use std::ops::Range;

use burn::tensor::{Device, Tensor, TensorData};
use burn_dtensor::Result;
use burn_dtensor::comm::{Op, Phase};
use burn_dtensor::dtensor::DTensor;
use burn_dtensor::dtensor::ops::RedistributePolicy;
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::placement::Layout;
use burn_dtensor::testing::graph_depth;
use itertools::Itertools;

use crate::dtensor::{part, values};

/// A trial of an operator on `x` and perhaps a weight, and a bias as long as the output has
/// channels.
pub struct Trial<'a, const D: usize> {
    pub name: String,
    pub x: [usize; D],
    pub weight: Option<([usize; D], usize)>,
    pub plain: &'a dyn Fn(Tensor<D>, Option<(Tensor<D>, Tensor<1>)>) -> Tensor<D>,
    pub sharded: &'a dyn Fn(DTensor<D>, Option<(DTensor<D>, DTensor<1>)>) -> DTensor<D>,
    /// The elements of the input that element `at` of the output is made from, along spatial
    /// dimension `dim`.
    pub reads: &'a dyn Fn(usize, usize) -> Vec<isize>,
}

/// Values without ties, around 0.
pub fn sample<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    let len: usize = shape.iter().product();
    let values: Vec<f32> = (0..len)
        .map(|i| ((i * 7919 + 13) % 1009) as f32 / 504.5 - 1.0)
        .collect();
    Tensor::from_data(TensorData::new(values, shape), device)
}

pub fn close(found: &[f32], expected: &[f32], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (at, (a, b)) in found.iter().zip(expected).enumerate() {
        assert!(
            (a - b).abs() <= 2e-5 * (1.0 + b.abs()),
            "{what}: {a} for {b} at {at}"
        );
    }
}

/// The bytes that this rank gives to others so that each has the rows it reads, and those it gives
/// back.
fn halo_bytes<const D: usize>(
    mesh: &DeviceMesh,
    input: &Layout,
    x: [usize; D],
    output: (&Layout, [usize; D]),
    reads: &dyn Fn(usize, usize) -> Vec<isize>,
) -> [u64; 2] {
    let coordinates = || {
        mesh.shape()
            .iter()
            .map(|&size| 0..size)
            .multi_cartesian_product()
    };
    let has = |at: &[usize]| input.local_slices(&x, at);
    // From the first row that the output there reads to the last, of those that exist.
    let needs = |at: &[usize]| -> Vec<Range<usize>> {
        let made = output.0.local_slices(&output.1, at);
        let of = |dim: usize| {
            if dim < 2 || input.shard_order(dim).is_empty() {
                return has(at)[dim].clone();
            }
            let rows = made[dim]
                .clone()
                .flat_map(|o| reads(dim - 2, o))
                .filter(|&row| row >= 0 && row < x[dim] as isize);
            rows.minmax()
                .into_option()
                .map_or(0..0, |(first, last)| first as usize..last as usize + 1)
        };
        let all: Vec<_> = (0..D).map(of).collect();
        if made.iter().any(|range| range.is_empty()) {
            vec![0..0; D]
        } else {
            all
        }
    };
    let shared = |a: &[Range<usize>], b: &[Range<usize>]| -> u64 {
        a.iter()
            .zip(b)
            .map(|(a, b)| a.end.min(b.end).saturating_sub(a.start.max(b.start)) as u64)
            .product()
    };
    let own = mesh.coordinate().unwrap();
    // Along other mesh dimensions others do the same.
    let is_spatial = |mesh_dim: usize| {
        input.placements()[mesh_dim]
            .shard_dim()
            .is_some_and(|dim| dim >= 2)
    };
    let other = |at: &Vec<usize>| (0..own.len()).all(|dim| is_spatial(dim) || at[dim] == own[dim]);
    let others = || coordinates().filter(|at| at != own).filter(other);
    let given: u64 = others().map(|at| shared(&has(own), &needs(&at))).sum();
    let taken: u64 = others().map(|at| shared(&has(&at), &needs(own))).sum();
    [4 * given, 4 * taken]
}

/// What a trial did on one rank.
#[derive(Debug, PartialEq, Eq, Clone, Copy)]
pub struct Did {
    pub depth: usize,
    pub calls: u64,
}

impl<const D: usize> Trial<'_, D> {
    /// Runs it on an input laid out so, and compares.
    pub fn run(&self, mesh: &DeviceMesh, layout: &Layout) -> Result<Did> {
        let (device, name) = (
            Device::flex().autodiff(),
            format!("{} as {layout}", self.name),
        );
        let ledger = mesh.world().ledger();
        let x = sample(self.x, &device).require_grad();
        let params = self.weight.map(|(weight, bias)| {
            (
                sample(weight, &device).require_grad(),
                sample([bias], &device).require_grad(),
            )
        });
        let expected = (self.plain)(x.clone(), params.clone());
        let factors = sample(expected.dims(), &Device::flex()).add_scalar(0.1);
        let grads = (expected.clone() * Tensor::from_inner(factors.clone()))
            .sum()
            .backward();

        let full = Layout::replicate(mesh.shape())?;
        let own_x = DTensor::distribute_replicated_to(
            sample(self.x, &device).require_grad(),
            mesh,
            layout.clone(),
        )?;
        let own_params = match &params {
            Some((weight, bias)) => Some((
                DTensor::distribute_replicated_to(
                    weight.clone().detach().require_grad(),
                    mesh,
                    full.clone(),
                )?,
                DTensor::distribute_replicated_to(
                    bias.clone().detach().require_grad(),
                    mesh,
                    full,
                )?,
            )),
            None => None,
        };
        ledger.reset();
        let y = RedistributePolicy::Deny.run(|| (self.sharded)(own_x.clone(), own_params.clone()));
        assert_eq!(y.placements(), own_x.placements(), "{name}");
        assert_eq!(y.dims(), expected.dims(), "{name}");
        let [given, taken] = halo_bytes(mesh, layout, self.x, (y.layout(), y.dims()), self.reads);
        assert_eq!(
            ledger.bytes_in(Op::AllToAllList, Phase::Forward),
            given,
            "{name}"
        );
        let calls = ledger.calls_in(Op::AllToAllList, Phase::Forward);
        assert_eq!(
            ledger.total(|_| true).calls,
            calls,
            "{name}: nothing else travels"
        );
        let (y, depth) = graph_depth(y);
        let y = y.full_tensor()?;
        close(&values(y.clone()), &values(expected), &name);
        ledger.reset();
        let own_grads = (y * Tensor::from_inner(factors)).sum().backward();
        assert_eq!(
            ledger.bytes_in(Op::AllToAllList, Phase::Backward),
            taken,
            "{name}, backward"
        );
        assert_eq!(
            ledger.calls_in(Op::AllToAllList, Phase::Backward),
            calls,
            "{name}, backward"
        );
        close(
            &values(own_x.local().grad(&own_grads).unwrap()),
            &part(x.grad(&grads).unwrap(), &own_x),
            &format!("{name}: gradient"),
        );
        if let (Some((weight, bias)), Some((own_weight, own_bias))) = (params, own_params) {
            let found = own_weight.local().grad(&own_grads).unwrap();
            close(
                &values(found),
                &values(weight.grad(&grads).unwrap()),
                &format!("{name}: gradient of the weight"),
            );
            let found = own_bias.local().grad(&own_grads).unwrap();
            close(
                &values(found),
                &values(bias.grad(&grads).unwrap()),
                &format!("{name}: gradient of the bias"),
            );
        }
        Ok(Did {
            depth: depth.get().unwrap(),
            calls,
        })
    }
}

/// Every rank recorded as many nodes and made as many calls.
pub fn same_on_all(did: Vec<Vec<Did>>) -> Vec<Did> {
    for other in &did[1..] {
        assert_eq!(*other, did[0]);
    }
    did.into_iter().next().unwrap()
}
