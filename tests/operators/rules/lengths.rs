//! A dimension of 7. Cut over 2 and then 3 ranks it is `2 2 0 | 1 1 1`: a rank in the middle has
//! nothing, which every operator must do with, or gather.

use burn::tensor::IndexingUpdateOp::Add;
use burn::tensor::s;
use burn_dtensor::testing::prove::{Case, case};

pub fn cases() -> Vec<Case> {
    vec![
        case!("sum", (x: 1 = [7]) => x.sum()),
        case!("mean", (x: 1 = [7]) => x.mean()),
        case!("mean_dim", (x: 2 = [7, 1]) => x.mean_dim(0)),
        case!("max", (x: 1 = [7]) => x.max()),
        case!("min_dim", (x: 2 = [7, 1]) => x.min_dim(1)),
        case!("max_abs", (x: 1 = [7]) => x.max_abs()),
        case!("argmax", (x: 2 = [7, 2]) => x.argmax(1)),
        case!("max_dim_with_indices", (x: 2 = [7, 2]) => x.max_dim_with_indices(1)),
        case!("prod", (x: 1 = [7]) => x.prod()),
        case!("any", (m: 1 bool = [7]) => m.any()),
        case!("var_mean", (x: 2 = [7, 2]) => x.var_mean(0)),
        case!("median", (x: 2 = [7, 3]) => x.median(1)),
        case!("sort", (x: 2 = [7, 2]) => x.sort(1)),
        case!("topk", (x: 2 = [7, 3]) => x.topk(2, 1)),
        case!("cumsum", (x: 2 = [7, 2]) => x.cumsum(1)),
        case!("softmax", (x: 2 = [7, 2]) => activation::softmax(x, 1)),
        case!("glu", (x: 2 = [7, 2]) => activation::glu(x, 1)),
        case!("log", (x: 1 positive = [7]) => x.log()),
        case!("flip", (x: 2 = [7, 2]) => x.flip([1])),
        case!("triu", (x: 2 = [7, 2]) => x.triu(0)),
        case!("cat", (a: 2 = [7, 1], b: 2 = [7, 2]) => Tensor::cat(vec![a, b], 1)),
        case!("stack", (a: 1 = [7], b: 1 = [7]) => Tensor::stack::<2>(vec![a, b], 1)),
        case!("chunk", (x: 2 = [7, 2]) => x.chunk(2, 1)),
        case!("slice_fill", (x: 2 = [7, 2]) => x.slice_fill(s![.., 1..2], 0.0)),
        case!("pad", (x: 2 = [7, 2]) => x.pad([(1, 1)], burn::tensor::ops::PadMode::Constant(1.5))),
        case!("reshape", (x: 2 = [7, 2]) => x.reshape([14])),
        case!("gather", (x: 2 = [7, 2], i: 2 int(2) = [7, 1]) => x.gather(1, i)),
        case!("select", (x: 2 = [7, 2], i: 1 int(2) = [1]) => x.select(1, i)),
        case!("scatter", (x: 2 = [7, 2], i: 2 int(2) = [7, 1], v: 2 = [7, 1]) => x.scatter(1, i, v, Add)),
        case!("one_hot", (i: 1 int(3) = [7]) => i.one_hot::<2>(3)),
        case!("embedding", (w: 2 = [7, 2], i: 2 int(7) = [7, 1]) => module::embedding(w, i)),
        case!("matmul", (a: 2 = [7, 2], b: 2 = [2, 7]) => a.matmul(b)),
        case!("linear", (x: 2 = [7, 2], w: 2 = [2, 7]) => module::linear(x, w, None)),
        case!("layer_norm", (x: 2 = [7, 2], gamma: 1 = [2]) => module::layer_norm(x, gamma, None, 1e-5)),
        case!("batch_norm_train", (x: 2 = [7, 2], gamma: 1 = [2], beta: 1 = [2]) => {
            let normalized = module::batch_norm_train(x, gamma, beta, 1e-5);
            (normalized.output, normalized.mean, normalized.variance)
        }),
        case!("attention", (x: 4 = [7, 1, 2, 2]) => {
            module::attention(x.clone(), x.clone(), x, None, None, Default::default())
        }),
        case!("max_pool1d", (x: 3 = [7, 1, 3]) => {
            module::max_pool1d(x, burn::tensor::ops::MaxPoolOptions::new([2]))
        }),
    ]
}
