//! All of the model's parallelism.

use burn_dtensor::prelude::*;

use super::model::{Llama, LlamaConfig};

/// Distributes the model: tensor and sequence parallel over mesh dimension `tp`, fully sharded over
/// `shard`, replicated over `replicate`. A mesh may lack `shard` or `replicate`.
///
/// # Collective
/// Every rank of the mesh must call it.
pub fn parallel(model: Llama, config: &LlamaConfig, mesh: &DeviceMesh) -> Result<Llama> {
    let sequence = Placement::Shard(1);
    let plan = Plan::new()
        // Between the matrix products, activations [batch, seq, dim] are sharded along the
        // sequence.
        .with_style("token", Style::rowwise().with_output(sequence))
        .with_style("blocks.*.*_norm", Style::sequence_parallel())
        .with_style("norm", Style::sequence_parallel())
        // Each rank computes complete heads, and a shard of the hidden features.
        .with_style(
            "blocks.*.attention.query",
            Style::colwise().with_heads(config.heads),
        )
        .with_style(
            "blocks.*.attention.key",
            Style::colwise().with_heads(config.kv_heads),
        )
        .with_style(
            "blocks.*.attention.value",
            Style::colwise().with_heads(config.kv_heads),
        )
        .with_style(
            "blocks.*.attention.output",
            Style::rowwise()
                .with_heads(config.heads)
                .with_output(sequence),
        )
        .with_style("blocks.*.gate.*", Style::colwise())
        .with_style("blocks.*.down", Style::rowwise().with_output(sequence))
        // Logits stay sharded along the vocabulary, and the loss is computed from the shards.
        .with_style("head", Style::colwise())
        .with_units(["blocks.*"]);
    let model = parallelize(model, &mesh.slice("tp")?, plan)?;
    let data: Vec<&str> = mesh
        .names()
        .iter()
        .map(String::as_str)
        .filter(|name| *name != "tp")
        .collect();
    match data.is_empty() {
        true => Ok(model),
        false => fully_shard(
            model,
            &mesh.slice(data)?,
            FullyShard::new().with_units(["blocks.*"]),
        ),
    }
}
