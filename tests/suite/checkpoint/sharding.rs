//! [`Sharding`]: a mesh, and a way to distribute a model over it.

use std::hash::{DefaultHasher, Hash, Hasher};

use burn::module::Module;
use burn_dtensor::fsdp::{OffloadPolicy, ParamInfo, ParamPlacement};
use burn_dtensor::parallel::distribute_module;
use burn_dtensor::prelude::*;
use rand::Rng;
use rand::rngs::StdRng;

use super::random_net::Net;

/// Dimensions of meshes: `shard` and `replicate` of `fully_shard`, `tp` of `parallelize`, `ep` over
/// which experts are placed and everything else is sharded. Ranks along `copies` have the ordinary
/// model.
const MESHES: [&[&str]; 19] = [
    &["copies"],
    &["shard"],
    &["shard"],
    &["tp"],
    &["replicate", "shard"],
    &["shard", "replicate"],
    &["shard", "tp"],
    &["tp", "shard"],
    &["shard", "shard2"],
    &["tp", "tp2"],
    &["efsdp", "ep"],
    &["ep", "efsdp"],
    &["replicate", "shard", "tp"],
    &["tp", "shard", "replicate"],
    &["shard", "tp", "tp2"],
    &["shard", "shard2", "replicate"],
    &["efsdp", "ep", "tp"],
    &["tp", "ep", "efsdp"],
    &["replicate", "efsdp", "ep"],
];

/// A mesh, and the placements of a model on it.
#[derive(Debug, Clone)]
pub struct Sharding {
    pub names: &'static [&'static str],
    pub sizes: Vec<usize>,
    /// `fully_shard` comes before `parallelize`.
    shards_first: bool,
    /// The placements of parameters are a function of it and their paths.
    salt: u64,
    has_units: bool,
    is_balanced: bool,
    is_offloaded: bool,
    /// `fully_shard` ignores some parameters.
    ignores: bool,
}

impl Sharding {
    /// Draws a mesh of at most 8 ranks, or of so many.
    pub fn draw(rng: &mut StdRng, ranks: Option<usize>) -> Self {
        loop {
            let names = MESHES[rng.random_range(0..MESHES.len())];
            let most = if names.len() == 1 { 8 } else { 4 };
            let sizes: Vec<usize> = names.iter().map(|_| rng.random_range(1..=most)).collect();
            let drawn: usize = sizes.iter().product();
            if ranks.map_or(drawn <= 8, |ranks| drawn == ranks) {
                return Self {
                    names,
                    sizes,
                    shards_first: rng.random(),
                    salt: rng.random(),
                    has_units: rng.random(),
                    is_balanced: rng.random_bool(0.2),
                    is_offloaded: rng.random_bool(0.15),
                    ignores: rng.random_bool(0.2),
                };
            }
        }
    }

    pub fn ranks(&self) -> usize {
        self.sizes.iter().product()
    }

    /// Returns true if the model stays an ordinary one.
    pub fn is_ordinary(&self) -> bool {
        self.names == ["copies"]
    }

    pub fn mesh(&self, world: &World) -> Result<DeviceMesh> {
        DeviceMesh::new(world, &self.sizes, self.names)
    }

    pub fn distribute(&self, mut net: Net, mesh: &DeviceMesh) -> Result<Net> {
        let tensor = self.named(|name| name.starts_with("tp"));
        if self.names.contains(&"ep") {
            if !net.experts.is_empty() {
                let names = self.named(|name| name == "ep" || name.starts_with("tp"));
                net.experts = self.parallelized(net.experts, mesh, &names)?;
            }
            let config = self.config(net.blocks.len());
            return fully_shard(net, mesh, config);
        }
        let sharded = |net: Net, mesh: &DeviceMesh| {
            let names = self.named(|name| !name.starts_with("tp"));
            if names.is_empty() || self.is_ordinary() {
                return Ok(net);
            }
            let config = self.config(net.blocks.len());
            fully_shard(net, &mesh.slice(&names)?, config)
        };
        if self.shards_first {
            return self.parallelized(sharded(net, mesh)?, mesh, &tensor);
        }
        sharded(self.parallelized(net, mesh, &tensor)?, mesh)
    }

    fn parallelized<M: Module>(&self, model: M, mesh: &DeviceMesh, names: &[&str]) -> Result<M> {
        if names.is_empty() {
            return Ok(model);
        }
        distribute_module(model, &mesh.slice(names)?, |path, shape| {
            let placement = |name: &&str| {
                let dims = shape.len();
                // Each expert is on one rank along `ep`.
                match self.pick(path, name, if *name == "ep" { dims } else { 2 * dims + 1 }) {
                    replicated if replicated == 2 * dims => Placement::Replicate,
                    dim => Placement::Shard(dim % dims),
                }
            };
            names.iter().map(placement).collect::<Vec<_>>()
        })
    }

    fn config(&self, blocks: usize) -> FullyShard {
        let shard = self.named(|name| name.contains("shard") || name == "efsdp" || name == "ep");
        let config = FullyShard::new()
            .with_shard_dims(&shard)
            .with_replicate_dims(self.named(|name| name == "replicate"))
            .with_layer_warnings(false);
        let config = if self.has_units {
            config.with_units(["blocks.*"])
        } else {
            config
        };
        let config = if self.is_offloaded {
            config.with_offload(OffloadPolicy::Cpu)
        } else {
            config
        };
        // Shards of tensor-parallel ranks may have other sizes than the explicit ones.
        let is_alone = !self
            .names
            .iter()
            .any(|name| name.starts_with("tp") || *name == "ep");
        let config = if self.is_balanced && is_alone {
            config.with_balanced_bytes()
        } else {
            config
        };
        let config = if self.ignores && is_alone && !self.has_units && blocks > 1 {
            config.with_ignored(["blocks.0.*"])
        } else {
            config
        };
        let ranks = self
            .sizes
            .iter()
            .zip(self.names)
            .filter(|(_, name)| shard.contains(name))
            .map(|(size, _)| size);
        let (ranks, sharding) = (ranks.product(), self.clone());
        config.with_shard_placement_fn(move |ParamInfo { path, shape }: ParamInfo<'_>| {
            let dim = sharding.pick(path, "dim", shape.len());
            let sharded = || ParamPlacement::from(Placement::Shard(dim));
            match sharding.pick(path, "placement", 6) {
                0 => None,
                1 => Some(Placement::Replicate.into()),
                2 if is_alone => Some(ParamPlacement::uneven(
                    dim,
                    sharding.split(path, shape[dim], ranks),
                )),
                3 if shard.len() == 2 && is_alone => Some(sharded().with_mesh_dims(shard[1])),
                _ => Some(sharded()),
            }
        })
    }

    /// Divides a length among ranks.
    fn split(&self, path: &str, len: usize, ranks: usize) -> Vec<usize> {
        let mut ends: Vec<_> = (1..ranks)
            .map(|rank| self.pick(path, &rank.to_string(), len + 1))
            .collect();
        ends.push(len);
        ends.sort_unstable();
        let starts = std::iter::once(0).chain(ends.iter().copied());
        ends.iter()
            .zip(starts)
            .map(|(end, start)| end - start)
            .collect()
    }

    fn named(&self, is: impl Fn(&str) -> bool) -> Vec<&'static str> {
        self.names.iter().copied().filter(|name| is(name)).collect()
    }

    /// Returns one of so many numbers, the same on every rank.
    fn pick(&self, path: &str, what: &str, count: usize) -> usize {
        let mut hasher = DefaultHasher::new();
        (self.salt, path, what).hash(&mut hasher);
        (hasher.finish() % count as u64) as usize
    }
}
