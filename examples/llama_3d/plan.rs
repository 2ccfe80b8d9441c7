//! How the model is parallel: all there is to it.

use burn_dtensor::prelude::*;

use super::model::{Llama, LlamaConfig};

/// Tensor and sequence parallel over mesh dimension `tp`, fully sharded over `shard`, replicated
/// over `replicate`; a mesh may lack any of them.
///
/// # Collective
/// Every rank of the mesh.
pub fn parallel(model: Llama, config: &LlamaConfig, mesh: &DeviceMesh) -> Result<Llama> {
    let sequence = Placement::Shard(1);
    let plan = Plan::new()
        // Between the products, activations [batch, seq, dim] are split along the sequence.
        .with("token", Style::rowwise().with_output(sequence))
        .with("blocks.*.*_norm", Style::sequence_parallel())
        .with("norm", Style::sequence_parallel())
        // Each rank computes whole heads, and a part of the hidden features.
        .with("blocks.*.attention.query", Style::colwise().with_heads(config.heads))
        .with("blocks.*.attention.key", Style::colwise().with_heads(config.kv_heads))
        .with("blocks.*.attention.value", Style::colwise().with_heads(config.kv_heads))
        .with("blocks.*.attention.output", Style::rowwise().with_heads(config.heads).with_output(sequence))
        .with("blocks.*.gate.*", Style::colwise())
        .with("blocks.*.down", Style::rowwise().with_output(sequence))
        // Logits stay split along the vocabulary; so is the loss computed.
        .with("head", Style::colwise())
        .units(["blocks.*"]);
    let model = parallelize(model, &mesh.slice("tp")?, plan)?;
    let data: Vec<&str> = mesh.names().iter().map(String::as_str).filter(|name| *name != "tp").collect();
    match data.is_empty() {
        true => Ok(model),
        false => fully_shard(model, &mesh.slice(data)?, FullyShard::new().units(["blocks.*"])),
    }
}
