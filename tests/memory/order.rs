//! Models whose units come up in another order than that of a chain: what is alive in backward does
//! not grow with depth where ranks run alike, and where gradients are held it is known how much.

use burn::module::Module;
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::tensor::{Device, Int, Tensor};
use burn_dtensor::prelude::*;

use crate::live::{self, alone};

/// Two towers of blocks, a table for the second, and a matrix per block that is read outside its
/// unit.
#[derive(Module, Debug)]
struct Net {
    table: Embedding,
    a: Vec<Linear>,
    b: Vec<Linear>,
    mix: Vec<Linear>,
    head: Linear,
}

const RANKS: usize = 2;
const WIDTH: usize = 256;
const ROWS: usize = 2;
const BLOCK: usize = (WIDTH * WIDTH + WIDTH) * 4;

fn linears(n: usize, device: &Device) -> Vec<Linear> {
    (0..n)
        .map(|_| LinearConfig::new(WIDTH, WIDTH).init(device))
        .collect()
}

fn chain(layers: &[Linear], x: Tensor<2>) -> Tensor<2> {
    layers.iter().fold(x, |x, layer| {
        unit(layer, x, |layer, x| layer.forward(x).tanh())
    })
}

fn input(device: &Device) -> Tensor<2> {
    Tensor::ones([ROWS, WIDTH], device)
}

type Loss = fn(&Net, &Device) -> Tensor<1>;

/// What is alive at the peak of backward beyond shards, activations and gradient shards, in blocks,
/// a rank.
fn transients(layers: [usize; 3], loss: Loss) -> f64 {
    let [a, b, mix] = layers;
    let make = |world: &World, device: &Device| {
        let net = Net {
            table: EmbeddingConfig::new(WIDTH, WIDTH).init(device),
            a: linears(a, device),
            b: linears(b, device),
            mix: linears(mix, device),
            head: LinearConfig::new(WIDTH, WIDTH).init(device),
        };
        let mesh = DeviceMesh::new(world, [RANKS], ["shard"])?;
        let towers = [("a.*", a), ("b.*", b), ("mix.*", mix), ("table", 1)];
        let patterns = towers
            .into_iter()
            .filter(|(_, layers)| *layers > 0)
            .map(|(pattern, _)| pattern);
        let units = FullyShard::new().with_units(patterns);
        fully_shard(
            net,
            &mesh,
            units.with_reshard_after_forward(ReshardAfterForward::Always),
        )
    };
    let m = live::measure(RANKS, false, make, loss);
    // Gradient shards are as large as shards. What backward frees on its way is left out.
    (m.peak_backward as f64 - m.after_forward as f64 - m.before as f64) / BLOCK as f64
}

/// The transients of 4 and of 32 layers are equal, but for ranks whose peaks meet or not.
fn assert_flat(what: &str, layers: fn(usize) -> [usize; 3], loss: Loss) {
    let _alone = alone();
    let [shallow, deep] = [4, 32].map(|n| transients(layers(n), loss));
    println!(
        "{what}: {shallow:.2} blocks above shards and gradients with 4 layers, {deep:.2} with 32"
    );
    assert!(
        deep <= shallow.max(0.0) + 1.5,
        "{what}: {shallow} blocks at 4 layers, {deep} at 32"
    );
    assert!(deep <= 6.0, "{what}: {deep} blocks");
}

#[test]
fn a_chain_with_a_head_read_outside_any_unit() {
    assert_flat(
        "chain, head read outside",
        |n| [n, 0, 0],
        |net, device| net.head.forward(chain(&net.a, input(device))).sum(),
    );
}

#[test]
fn a_chain_whose_every_layer_reads_a_weight_outside_its_unit() {
    assert_flat(
        "chain, a matrix a layer read outside",
        |n| [n, 0, n],
        |net, device| {
            let forward = |net: &Net, x| {
                let layers = net.a.iter().zip(&net.mix);
                layers
                    .fold(x, |x, (layer, mix)| {
                        mix.forward(unit(layer, x, |layer, x| layer.forward(x).tanh()))
                    })
                    .sum()
            };
            unit(net, input(device), forward)
        },
    );
}

#[test]
fn an_encoder_and_a_decoder_with_an_embedding_unit() {
    assert_flat(
        "encoder and decoder",
        |n| [n, n, 0],
        |net, device| {
            let encoded = chain(&net.a, input(device));
            let tokens = Tensor::<2, Int>::zeros([1, ROWS], device);
            let embedded = unit(&net.table, tokens, |table, tokens| {
                table.forward(tokens).squeeze_dim::<2>(0)
            });
            let decode = |x, layer: &Linear| {
                unit(
                    layer,
                    (x, encoded.clone()),
                    |layer, (x, encoded): (Tensor<2>, Tensor<2>)| layer.forward(x + encoded).tanh(),
                )
            };
            net.b.iter().fold(embedded, decode).sum()
        },
    );
}

#[test]
fn two_towers_under_a_root_unit() {
    assert_flat(
        "two towers under a root unit",
        |n| [n, n, 0],
        |net, device| {
            unit(net, input(device), |net, x| {
                (chain(&net.a, x.clone()) + chain(&net.b, x)).sum()
            })
        },
    );
}

/// Two towers that nothing encloses may be two losses: gradients of the first are held until the
/// second is through. This is the cost.
#[test]
fn two_towers_that_nothing_encloses_hold_one_towers_gradients() {
    let _alone = alone();
    let loss: Loss =
        |net, device| (chain(&net.a, input(device)) + chain(&net.b, input(device))).sum();
    let [shallow, deep] = [4, 32].map(|n| transients([n, n, 0], loss));
    println!("two towers, not enclosed: {shallow:.2} blocks with 4 layers, {deep:.2} with 32");
    assert!(
        deep > 8.0,
        "nothing was held: {deep} blocks; then this may be asserted to be flat"
    );
    assert!(
        deep <= 32.0 + 6.0,
        "more than one tower was held: {deep} blocks"
    );
}
