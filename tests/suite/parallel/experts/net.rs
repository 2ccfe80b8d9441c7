//! A mixture of experts, its plain forward and the one that sends tokens to the ranks of their
//! experts.

use burn::module::{Module, Param};
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::activation::softmax;
use burn::tensor::{Device, Tensor, TensorData};
use burn_dtensor::prelude::*;

use crate::fsdp::support::{tensor, values};

pub const DIM: usize = 5;
const HIDDEN: usize = 7;
/// More than ranks, and not a multiple of two.
pub const EXPERTS: usize = 3;
pub const TOKENS: usize = 4;
pub const BLOCKS: usize = 2;

#[derive(Module, Debug)]
pub struct Net {
    pub first: Linear,
    pub blocks: Vec<Block>,
    pub head: Linear,
}

#[derive(Module, Debug)]
pub struct Block {
    pub norm: LayerNorm,
    pub router: Linear,
    pub experts: Experts,
}

/// The weights of all experts.
#[derive(Module, Debug)]
pub struct Experts {
    /// `[experts, dim, hidden]`.
    pub up: Param<Tensor<3>>,
    /// `[experts, hidden, dim]`.
    pub down: Param<Tensor<3>>,
}

/// How expert weights are read.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Read {
    /// Whole, by every rank.
    Full,
    /// Where they lie.
    Placed,
}

impl Net {
    pub fn new() -> Self {
        let device = Device::flex();
        device.seed(6);
        let param = |seed, shape| Param::from_tensor(tensor(seed, shape, &device));
        let block = |seed| Block {
            norm: LayerNormConfig::new(DIM).init(&device),
            router: LinearConfig::new(DIM, EXPERTS).init(&device),
            experts: Experts {
                up: param(seed, [EXPERTS, DIM, HIDDEN]),
                down: param(seed + 1, [EXPERTS, HIDDEN, DIM]),
            },
        };
        let net = Self {
            first: LinearConfig::new(DIM, DIM).init(&device),
            blocks: [20, 30].map(block).into(),
            head: LinearConfig::new(DIM, DIM).init(&device),
        };
        // Draw now, on one thread.
        let _ = values(&net, None);
        net
    }

    /// The loss of the tokens of one data-parallel rank.
    pub fn loss_on(&self, step: usize, rank: usize, read: Read, device: &Device) -> Tensor<1> {
        let seed = (step * 64 + rank) as u64;
        let (x, y) = (
            tensor(seed, [TOKENS, DIM], device),
            tensor(seed + 1000, [TOKENS, DIM], device),
        );
        // Each token goes to one expert, of which no rank uses all in every step.
        let chosen = (0..TOKENS * EXPERTS).map(|at| {
            let (token, expert) = (at / EXPERTS, at % EXPERTS);
            f32::from(expert == (token / 2 + step + rank) % EXPERTS)
        });
        let chosen = TensorData::new(chosen.collect::<Vec<_>>(), [TOKENS, EXPERTS]);
        let chosen = Tensor::<2>::from_data(chosen, device);
        let out = unit(self, x, |net, x| {
            let mut x = net.first.forward(x);
            for block in &net.blocks {
                x = unit(block, x, |block, x| block.forward(x, chosen.clone(), read));
            }
            net.head.forward(x)
        });
        (out - y).square().mean()
    }
}

impl Block {
    /// `[tokens, dim]` to the same, where `chosen`, `[tokens, experts]`, is 1 for the expert of a
    /// token.
    fn forward(&self, x: Tensor<2>, chosen: Tensor<2>, read: Read) -> Tensor<2> {
        let h = self.norm.forward(x.clone());
        let weight = softmax(self.router.forward(h.clone()), 1) * chosen.clone();
        let to_experts = |weight: Tensor<2>| weight.swap_dims(0, 1).unsqueeze_dim::<3>(2);
        // `[experts, tokens, dim]`, zeros where a token goes to another.
        let sent = to_experts(chosen) * h.unsqueeze_dim::<3>(0);
        let computed = match read {
            Read::Full => self.experts.forward(sent),
            Read::Placed => self
                .experts
                .parallel(sent)
                .unwrap_or_else(|error| error.unwind()),
        };
        x + (to_experts(weight) * computed)
            .sum_dim(0)
            .squeeze_dim::<2>(0)
    }
}

impl Experts {
    /// `[experts, tokens, dim]` to the same.
    fn forward(&self, sent: Tensor<3>) -> Tensor<3> {
        sent.matmul(self.up.val()).tanh().matmul(self.down.val())
    }

    /// The same: each rank's tokens go to the ranks along `ep` that have their experts, and come
    /// back.
    fn parallel(&self, sent: Tensor<3>) -> Result<Tensor<3>> {
        let (up, down) = (self.up.dtensor()?, self.down.dtensor()?);
        let mesh = up.mesh().clone();
        let placed = |on_ep: Placement| -> Vec<Placement> {
            let of = |name: &String| {
                if name == "ep" {
                    on_ep
                } else {
                    Placement::Replicate
                }
            };
            mesh.names().iter().map(of).collect()
        };
        let (by_token, by_expert) = (placed(Placement::Shard(1)), placed(Placement::Shard(0)));
        let sent = DTensor::from_local(sent, &mesh, &by_token)?.redistribute(&by_expert)?;
        Ok(sent
            .matmul(up)
            .tanh()
            .matmul(down)
            .redistribute(&by_token)?
            .to_local())
    }
}

/// Experts over `ep`, and their hidden values over `tp` if the mesh has that.
pub fn place_experts(mut net: Net, mesh: &DeviceMesh) -> Result<Net> {
    let plan = |name: &str| match name {
        "ep" => Plan::new().with_style("*", Style::placed(Placement::Shard(0))),
        _ => Plan::new()
            .with_style("up", Style::placed(Placement::Shard(2)))
            .with_style("down", Style::placed(Placement::Shard(1))),
    };
    let names: Vec<_> = mesh
        .names()
        .iter()
        .filter(|name| ["ep", "tp"].contains(&name.as_str()))
        .collect();
    let tensor = mesh.slice(&names)?;
    for block in &mut net.blocks {
        let plan = names.iter().fold(Plan::new(), |all, name| {
            all.with_mesh_dim_plan(*name, plan(name))
        });
        block.experts = parallelize(block.experts.clone(), &tensor, plan)?;
    }
    Ok(net)
}

/// All over the dimensions that are neither `tp` nor `replicate`, but for experts, which are placed
/// over `ep` already.
pub fn distribute(net: Net, mesh: &DeviceMesh, config: FullyShard) -> Result<Net> {
    let named = |is: fn(&str) -> bool| {
        mesh.names()
            .iter()
            .filter(|name| is(name))
            .cloned()
            .collect::<Vec<_>>()
    };
    let shard = named(|name| !["tp", "replicate"].contains(&name));
    let config = config
        .with_shard_dims(shard)
        .with_replicate_dims(named(|name| name == "replicate"));
    fully_shard(place_experts(net, mesh)?, mesh, config)
}

/// A unit for each block.
pub fn blocks() -> FullyShard {
    FullyShard::new().with_units(["blocks.*"])
}
