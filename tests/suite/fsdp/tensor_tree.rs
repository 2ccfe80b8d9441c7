//! What goes in and out of units: containers, what others have made, and structs of one's own.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;

use burn::nn::attention::MhaOutput;
use burn::nn::{Linear, LstmState, RnnState};
use burn::tensor::{Bool, DType, Device, Int, Tensor, TensorData};
use burn_dtensor::fsdp::{MixedPrecisionPolicy, TensorTree};
use burn_dtensor::nn::TransformerEncoderInput;
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::net::{Net, WIDTH, compare, config};
use super::support::{on_device, tensor};
use crate::compiler::Compiler;

/// Of a program: what a rank reads.
struct Batch {
    x: Tensor<2>,
    mask: Option<Tensor<2, Bool>>,
    at: Tensor<1, Int>,
    source: Source,
}

/// No tensor, and nothing that a unit knows.
#[derive(Debug, PartialEq)]
struct Source(&'static str);

struct Pair<A, B>(A, B);

/// Borrows what others own.
struct Seen<'a, const D: usize> {
    x: Tensor<D>,
    names: &'a [String],
}

#[expect(clippy::large_enum_variant, reason = "as a program may write it")]
enum Way {
    Plain(Tensor<2>),
    Gated { x: Tensor<2>, gate: Tensor<2> },
    Skip,
}

struct Nothing;

tensor_tree! {
    struct Batch { x, mask, at, .. }
    [A: TensorTree, B: TensorTree] struct Pair<A, B>(first, second);
    ['a, const D: usize] struct Seen<'a, D> { x, names }
    enum Way { Plain(x), Gated { x, gate }, Skip }
    struct Nothing {}
}

/// How many floats are inside, and the structure with the first of them times 1, the second times
/// 2, and so on.
fn numbered<T: TensorTree>(value: T) -> (usize, T) {
    let mut met = 0;
    let value = value.map_floats(&mut |tensor| {
        met += 1;
        Tensor::<2>::from_dispatch(tensor)
            .mul_scalar(met as f32)
            .into_dispatch()
    });
    (met, value)
}

fn first(x: &Tensor<2>) -> f32 {
    x.clone()
        .into_data()
        .iter::<f32>()
        .next()
        .expect("an element")
}

fn x() -> Tensor<2> {
    Tensor::ones([1, 2], &Device::flex())
}

#[test]
fn containers_hand_out_every_float_once_and_keep_the_rest() {
    let (count, (map, tree, queue)) = numbered((
        HashMap::from([("b", x()), ("a", x()), ("c", x())]),
        BTreeMap::from([(2, vec![x()]), (1, vec![x(), x()])]),
        VecDeque::from([Some(x()), None]),
    ));
    assert_eq!(count, 7);
    // Maps in the order of their keys.
    assert_eq!(["a", "b", "c"].map(|key| first(&map[key])), [1.0, 2.0, 3.0]);
    assert_eq!(
        [
            first(&tree[&1][0]),
            first(&tree[&1][1]),
            first(&tree[&2][0])
        ],
        [4.0, 5.0, 6.0]
    );
    assert_eq!(first(queue[0].as_ref().expect("it was there")), 7.0);

    let (shared, kept) = (Arc::new(x()), Rc::new(x()));
    let (count, (changed, also)) = numbered((shared.clone(), kept.clone()));
    assert_eq!((count, first(&changed), first(&also)), (2, 1.0, 2.0));
    assert_eq!(
        [first(&shared), first(&kept)],
        [1.0; 2],
        "others that share it keep what they have"
    );

    let twelve = (x(), x(), x(), x(), x(), x(), x(), x(), x(), x(), x(), x());
    let (count, twelve) = numbered(twelve);
    assert_eq!((count, first(&twelve.11)), (12, 12.0));

    let (tensor, mut cache) = (x(), vec![x()]);
    let data = TensorData::from([1.0f32]);
    let (count, other) = numbered((
        &tensor,
        &mut cache,
        3u8,
        'c',
        0..4,
        data.clone(),
        "text",
        (),
        Source("text").0,
    ));
    assert_eq!(
        (count, first(other.0), other.4, other.5),
        (0, 1.0, 0..4, data)
    );
}

#[test]
fn what_burns_layers_take_and_return_is_mapped() {
    let lstm = LstmState::new(x(), x());
    let (count, (lstm, rnn)) = numbered((lstm, RnnState::new(x())));
    assert_eq!(
        (
            count,
            first(&lstm.cell),
            first(&lstm.hidden),
            first(&rnn.hidden)
        ),
        (3, 1.0, 2.0, 3.0)
    );
    let (four, three) = (
        Tensor::ones([1, 1, 2, 2], &Device::flex()),
        Tensor::ones([1, 2, 2], &Device::flex()),
    );
    let mut met = 0;
    let output = MhaOutput {
        weights: four,
        context: three,
    }
    .map_floats(&mut |tensor| {
        met += 1;
        tensor
    });
    assert_eq!((met, output.context.dims()), (2, [1, 2, 2]));
    MeshTest::new([2], ["tp"]).run(|mesh| {
        let x = DTensor::<3>::ones([1, 2, 2], mesh, &[Placement::Shard(0)], mesh.device())?;
        let mut met = 0;
        let _ = TransformerEncoderInput::new(x).map_floats(&mut |tensor| {
            met += 1;
            tensor
        });
        assert_eq!(met, 1);
        Ok(())
    });
}

#[test]
fn structs_and_enums_of_ones_own_are_mapped_by_their_fields() {
    let device = Device::flex();
    let batch = Batch {
        x: x(),
        mask: None,
        at: Tensor::zeros([1], &device),
        source: Source("a"),
    };
    let names = ["one".to_string()];
    let ways = [Way::Plain(x()), Way::Gated { x: x(), gate: x() }, Way::Skip];
    let seen = Seen {
        x: x(),
        names: &names,
    };
    let (count, (batch, Pair(seen, _), ways)) = numbered((batch, Pair(seen, Nothing), ways));
    assert_eq!(
        (
            count,
            first(&batch.x),
            batch.source,
            first(&seen.x),
            seen.names
        ),
        (5, 1.0, Source("a"), 2.0, &names[..])
    );
    assert!(batch.mask.is_none() && batch.at.dims() == [1]);
    let [Way::Plain(plain), Way::Gated { x, gate }, Way::Skip] = ways else {
        panic!("the variants stay")
    };
    assert_eq!([first(&plain), first(&x), first(&gate)], [3.0, 4.0, 5.0]);
}

fn gated(block: &Linear, way: Way) -> Way {
    match way {
        Way::Plain(x) => Way::Gated {
            gate: block.forward(x.clone()),
            x,
        },
        Way::Gated { x, gate } => Way::Plain(block.forward(x) * gate.tanh()),
        Way::Skip => Way::Skip,
    }
}

/// Each unit takes another structure than it returns; gradients go through all of them.
#[test]
fn gradients_go_through_structures_of_ones_own() {
    fn forward(net: &Net, x: Tensor<2>, _: usize) -> Tensor<2> {
        unit(net, x, |net, x| {
            let device = x.device();
            let batch = Batch {
                mask: Some(x.clone().greater_elem(0.0)),
                at: Tensor::from_data([2, 0, 1], &device),
                source: Source("a file"),
                x,
            };
            let batch = unit(&net.blocks[0], batch, |block, batch| {
                let x = block
                    .forward(batch.x)
                    .mask_fill(batch.mask.clone().expect("it came along"), 0.25);
                Batch { x, ..batch }
            });
            assert_eq!(batch.source, Source("a file"));
            let x = batch.x.select(0, batch.at);
            let way = unit(&net.blocks[1], Way::Plain(x), gated);
            let Way::Plain(x) = unit(&net.blocks[2], way, gated) else {
                panic!("a gated one becomes plain")
            };
            let named = HashMap::from([("x".to_string(), x.clone()), ("y".to_string(), x.tanh())]);
            let named = unit(&net.spare, named, |spare, named| {
                named
                    .into_iter()
                    .map(|(name, x)| (name, Rc::new(spare.forward(x))))
                    .collect::<BTreeMap<_, _>>()
            });
            net.first
                .forward((*named["x"]).clone() - (*named["y"]).clone())
                * net.scale.val().unsqueeze()
        })
    }
    for ranks in [1, 2, 3] {
        compare(
            ranks,
            |net| net,
            config().with_reshard_after_forward(ReshardAfterForward::Always),
            forward,
        );
    }
}

/// burn's layer would refuse another type than its weights have.
#[test]
fn mixed_precision_casts_the_floats_of_structures_of_ones_own() {
    let net = super::net::net(&Device::flex());
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let policy = MixedPrecisionPolicy::new()
            .with_param_dtype(DType::BF16)
            .with_output_dtype(DType::F32);
        let net = fully_shard(
            on_device(&net, &device),
            mesh,
            config().with_mixed_precision(policy),
        )?;
        let x = tensor(3, [2, WIDTH], &device);
        let way = unit(&net.blocks[0], Way::Plain(x), |block, way| {
            let Way::Plain(x) = &way else {
                panic!("it is plain")
            };
            assert_eq!(x.dtype(), DType::BF16);
            gated(block, way)
        });
        let Way::Gated { x, gate } = way else {
            panic!("it is gated")
        };
        assert_eq!([x.dtype(), gate.dtype()], [DType::F32; 2]);
        Ok(())
    });
}

/// The compiler advises a reference, which compiles; the notes say why not, and what to write.
#[test]
fn a_struct_without_an_implementation_does_not_compile_and_the_message_says_what_to_write() {
    let compiler = Compiler::new("tensor-tree");
    let program = |implemented: &str| {
        format!(
            "use burn::{{nn::Linear, tensor::Tensor}};
             pub struct Batch {{ pub tokens: Tensor<2>, pub mask: Tensor<2> }}
             {implemented}
             pub fn forward(layer: &Linear, batch: Batch) -> Tensor<2> {{
                 burn_dtensor::fsdp::unit(layer, batch, |layer, batch| layer.forward(batch.tokens) * batch.mask)
             }}"
        )
    };
    let macro_call = "burn_dtensor::tensor_tree! { struct Batch { tokens, mask } }";
    compiler
        .check(&program(macro_call))
        .expect("the fields are named");
    let text = compiler
        .check(&program(""))
        .expect_err("its tensors are unknown");
    let said = [
        "error[E0277]: `Batch` cannot be an input or output of a unit",
        macro_call,
        "Do not borrow it: mixed precision does not cast tensors behind a reference",
    ];
    for said in said {
        assert!(text.contains(said), "`{said}` in:\n{text}");
    }
    compiler.finish();
}
