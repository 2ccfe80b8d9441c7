//! Operators whose spatial dimensions are cut: values and gradients are those of burn's operator on
//! whole tensors, and what travels is the halo, counted here by the definition of a window.

mod trial;

use burn::tensor::ops::{
    AvgPoolOptions, ConvOptions, ConvTransposeOptions, InterpolateMode, InterpolateOptions,
    MaxPoolOptions,
};
use burn::tensor::{DType, Tensor, module};
use burn_dtensor::dtensor::DTensor;
use burn_dtensor::dtensor::ops::module as sharded;
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::placement::{Layout, Placement};
use itertools::iproduct;

use super::{R, S, on_mesh};
use trial::{Trial, same_on_all};

fn window(
    kernel: usize,
    stride: usize,
    padding: usize,
    dilation: usize,
) -> impl Fn(usize) -> Vec<isize> {
    move |o| {
        (0..kernel)
            .map(|k| (o * stride + k * dilation) as isize - padding as isize)
            .collect()
    }
}

/// The elements that are spread to `o`.
fn spread(
    kernel: usize,
    stride: usize,
    padding: usize,
    dilation: usize,
) -> impl Fn(usize) -> Vec<isize> {
    move |o| {
        let to =
            |i: isize, k: usize| i * stride as isize + (k * dilation) as isize - padding as isize;
        (0..40)
            .filter(|&i| (0..kernel).any(|k| to(i, k) == o as isize))
            .collect()
    }
}

const LENS: [usize; 9] = [1, 2, 3, 4, 5, 7, 8, 10, 13];

/// Returns all cases with `LONG_TESTS`, and otherwise every fifth on 2 ranks, and every seventh,
/// from another on, on more. Neither has a factor in common with the number of values of a
/// parameter, so that every value is among those that remain.
fn some<T>(cases: impl Iterator<Item = T>, ranks: usize) -> impl Iterator<Item = T> {
    let (from, every) = match ranks {
        _ if crate::effort::is_long() => (0, 1),
        2 => (0, 5),
        _ => (ranks, 7),
    };
    cases.skip(from).step_by(every)
}

fn layout(mesh: &DeviceMesh, placements: &[Placement]) -> Layout {
    Layout::new(mesh.shape(), placements).unwrap()
}

#[test]
fn a_convolution_of_a_sharded_length_gets_its_halo_alone() {
    for ranks in [2, 3, 4] {
        let did = on_mesh(&[ranks], |_, mesh| {
            let mut did = Vec::new();
            let cases = iproduct!([1, 2, 3, 5], 1..=3, 0..=2, 1..=2, LENS);
            for (kernel, stride, padding, dilation, len) in some(cases, ranks) {
                if len + 2 * padding < dilation * (kernel - 1) + 1 {
                    continue;
                }
                let groups = 1 + (kernel + stride + len) % 2;
                let options = || ConvOptions::new([stride], [padding], [dilation], groups);
                let reads = window(kernel, stride, padding, dilation);
                let trial = Trial {
                    name: format!(
                        "conv1d of {len}, {kernel} by {stride} + {padding} x {dilation}, {groups} groups"
                    ),
                    x: [2, 2, len],
                    weight: Some(([4, 2 / groups, kernel], 4)),
                    plain: &|x, params| {
                        let (weight, bias) = params.unwrap();
                        // Burn's gradients of the weight are wrong where a stride leaves elements
                        // over.
                        let rest = (len + 2 * padding - dilation * (kernel - 1) - 1) % stride;
                        if groups == 1 || rest == 0 {
                            return module::conv1d(x, weight, Some(bias), options());
                        }
                        let ones: Vec<_> = (0..groups)
                            .map(|at| {
                                let [x, weight] = [(x.clone(), 1, 1), (weight.clone(), 0, 2)]
                                    .map(|(x, dim, len)| x.narrow(dim, at * len, len));
                                module::conv1d(
                                    x,
                                    weight,
                                    Some(bias.clone().narrow(0, at * 2, 2)),
                                    ConvOptions::new([stride], [padding], [dilation], 1),
                                )
                            })
                            .collect();
                        Tensor::cat(ones, 1)
                    },
                    sharded: &|x, params| {
                        let (weight, bias) = params.unwrap();
                        sharded::conv1d(x, weight, Some(bias), options())
                    },
                    reads: &|_, o| reads(o),
                };
                did.push(trial.run(mesh, &layout(mesh, &[S(2)]))?);
            }
            Ok(did)
        });
        let did = same_on_all(did);
        // Aligned: what a rank needs is its own.
        assert!(did.iter().any(|did| did.calls == 0) && did.iter().any(|did| did.calls == 1));
    }
}

#[test]
fn a_transposed_convolution_of_a_sharded_length_gets_its_halo_alone() {
    for ranks in [2, 3, 4] {
        let did = on_mesh(&[ranks], |_, mesh| {
            let mut did = Vec::new();
            let cases = iproduct!([1, 2, 3, 5], 1..=3, 0..=2, 1..=2, LENS);
            for (kernel, stride, padding, dilation, len) in some(cases, ranks) {
                let padding_out = (stride - 1).min(1);
                let full = (len - 1) * stride + dilation * (kernel - 1) + 1 + padding_out;
                if full <= 2 * padding {
                    continue;
                }
                let groups = 1 + (kernel + stride + len) % 2;
                let options = || {
                    ConvTransposeOptions::new(
                        [stride],
                        [padding],
                        [padding_out],
                        [dilation],
                        groups,
                    )
                };
                let reads = spread(kernel, stride, padding, dilation);
                let trial = Trial {
                    name: format!(
                        "conv_transpose1d of {len}, {kernel} by {stride} + {padding} x {dilation}, {groups} groups"
                    ),
                    x: [2, 2, len],
                    weight: Some(([2, 2, kernel], 2 * groups)),
                    plain: &|x, params| {
                        let (weight, bias) = params.unwrap();
                        module::conv_transpose1d(x, weight, Some(bias), options())
                    },
                    sharded: &|x, params| {
                        let (weight, bias) = params.unwrap();
                        sharded::conv_transpose1d(x, weight, Some(bias), options())
                    },
                    reads: &|_, o| reads(o),
                };
                did.push(trial.run(mesh, &layout(mesh, &[S(2)]))?);
            }
            Ok(did)
        });
        let did = same_on_all(did);
        assert!(did.iter().any(|did| did.calls == 0) && did.iter().any(|did| did.calls == 1));
    }
}

#[test]
fn images_may_be_sharded_both_ways() {
    let did = on_mesh(&[2, 2], |_, mesh| {
        let mut did = Vec::new();
        let placements = [
            [S(2), S(3)],
            [S(3), S(2)],
            [S(2), S(2)],
            [R, S(3)],
            [S(0), S(2)],
            [S(3), S(3)],
        ];
        let sizes = [(5, 4), (1, 7), (3, 2), (8, 9)];
        for (placements, (height, width), stride) in
            iproduct!(placements, sizes, [[1, 1], [2, 1], [2, 3]])
        {
            let options = || ConvOptions::new(stride, [1, 2], [1, 2], 1);
            let trial = Trial {
                name: format!("conv2d of {height} x {width} by {stride:?}"),
                x: [2, 2, height, width],
                weight: Some(([3, 2, 3, 2], 3)),
                plain: &|x, params| {
                    params
                        .map(|(weight, bias)| module::conv2d(x, weight, Some(bias), options()))
                        .unwrap()
                },
                sharded: &|x, params| {
                    params
                        .map(|(weight, bias)| sharded::conv2d(x, weight, Some(bias), options()))
                        .unwrap()
                },
                reads: &|dim, o| window([3, 2][dim], stride[dim], [1, 2][dim], [1, 2][dim])(o),
            };
            did.push(trial.run(mesh, &layout(mesh, &placements))?);
            let options = || ConvTransposeOptions::new(stride, [1, 0], [0, 0], [1, 1], 1);
            let trial = Trial {
                name: format!("conv_transpose2d of {height} x {width} by {stride:?}"),
                x: [2, 2, height, width],
                weight: Some(([2, 3, 3, 2], 3)),
                plain: &|x, params| {
                    params
                        .map(|(weight, bias)| {
                            module::conv_transpose2d(x, weight, Some(bias), options())
                        })
                        .unwrap()
                },
                sharded: &|x, params| {
                    params
                        .map(|(weight, bias)| {
                            sharded::conv_transpose2d(x, weight, Some(bias), options())
                        })
                        .unwrap()
                },
                reads: &|dim, o| spread([3, 2][dim], stride[dim], [1, 0][dim], 1)(o),
            };
            did.push(trial.run(mesh, &layout(mesh, &placements))?);
        }
        Ok(did)
    });
    same_on_all(did);
}

#[test]
fn volumes_may_be_sharded_along_any_of_three_dimensions() {
    let did = on_mesh(&[2, 2], |_, mesh| {
        let mut did = Vec::new();
        for placements in [[S(2), S(3)], [S(4), S(2)], [S(3), S(3)], [S(4), R]] {
            let trial = Trial {
                name: "conv3d".into(),
                x: [1, 2, 4, 5, 3],
                weight: Some(([2, 2, 2, 3, 2], 2)),
                plain: &|x, params| {
                    params
                        .map(|(w, b)| {
                            module::conv3d(
                                x,
                                w,
                                Some(b),
                                ConvOptions::new([1, 2, 1], [1, 1, 0], [1, 1, 2], 1),
                            )
                        })
                        .unwrap()
                },
                sharded: &|x, params| {
                    params
                        .map(|(w, b)| {
                            sharded::conv3d(
                                x,
                                w,
                                Some(b),
                                ConvOptions::new([1, 2, 1], [1, 1, 0], [1, 1, 2], 1),
                            )
                        })
                        .unwrap()
                },
                reads: &|dim, o| {
                    window(
                        [2, 3, 2][dim],
                        [1, 2, 1][dim],
                        [1, 1, 0][dim],
                        [1, 1, 2][dim],
                    )(o)
                },
            };
            did.push(trial.run(mesh, &layout(mesh, &placements))?);
            let options =
                || ConvTransposeOptions::new([1, 2, 1], [1, 0, 0], [0, 1, 0], [1, 1, 2], 1);
            let trial = Trial {
                name: "conv_transpose3d".into(),
                x: [1, 2, 4, 3, 3],
                weight: Some(([2, 2, 2, 3, 2], 2)),
                plain: &|x, params| {
                    params
                        .map(|(w, b)| module::conv_transpose3d(x, w, Some(b), options()))
                        .unwrap()
                },
                sharded: &|x, params| {
                    params
                        .map(|(w, b)| sharded::conv_transpose3d(x, w, Some(b), options()))
                        .unwrap()
                },
                reads: &|dim, o| {
                    spread(
                        [2, 3, 2][dim],
                        [1, 2, 1][dim],
                        [1, 0, 0][dim],
                        [1, 1, 2][dim],
                    )(o)
                },
            };
            did.push(trial.run(mesh, &layout(mesh, &placements))?);
        }
        Ok(did)
    });
    same_on_all(did);
}

#[test]
fn pools_of_a_sharded_length_get_their_halo_alone() {
    for ranks in [2, 3, 4] {
        let did = on_mesh(&[ranks], |_, mesh| {
            let mut did = Vec::new();
            let cases = iproduct!(1..=3, 1..=3, 0..=1, [false, true], LENS);
            for (kernel, stride, padding, ceil, len) in some(cases, ranks) {
                if len + 2 * padding < kernel || 2 * padding > kernel {
                    continue;
                }
                let name = format!("of {len}, {kernel} by {stride} + {padding}, {ceil}");
                let max = || {
                    let options = MaxPoolOptions::new([kernel])
                        .with_stride([stride])
                        .with_padding([padding]);
                    options.with_ceil_mode(ceil)
                };
                let trial = Trial {
                    name: format!("max_pool1d {name}"),
                    x: [2, 2, len],
                    weight: None,
                    plain: &|x, _| module::max_pool1d(x, max()),
                    sharded: &|x, _| sharded::max_pool1d(x, max()),
                    reads: &|_, o| window(kernel, stride, padding, 1)(o),
                };
                did.push(trial.run(mesh, &layout(mesh, &[S(2)]))?);
                for (counts, after) in iproduct!([false, true], [0, 1])
                    .filter(|(_, after)| len + padding + after >= kernel)
                {
                    let padding = [(padding, after)];
                    let avg = || {
                        let options = AvgPoolOptions::new([kernel])
                            .with_stride([stride])
                            .with_padding_pairs(padding);
                        options.with_ceil_mode(ceil).with_count_include_pad(counts)
                    };
                    let trial = Trial {
                        name: format!("avg_pool1d {name}, {padding:?} {counts}"),
                        x: [2, 2, len],
                        weight: None,
                        plain: &|x, _| module::avg_pool1d(x, avg()),
                        sharded: &|x, _| sharded::avg_pool1d(x, avg()),
                        reads: &|_, o| window(kernel, stride, padding[0].0, 1)(o),
                    };
                    did.push(trial.run(mesh, &layout(mesh, &[S(2)]))?);
                }
            }
            Ok(did)
        });
        same_on_all(did);
    }
}

#[test]
fn pools_of_images_may_be_sharded_both_ways() {
    let did = on_mesh(&[2, 2], |_, mesh| {
        let mut did = Vec::new();
        for (placements, size) in iproduct!(
            [[S(2), S(3)], [S(2), S(2)], [R, S(3)]],
            [[5, 4], [7, 3], [2, 9]]
        ) {
            let max = || {
                MaxPoolOptions::new([3, 2])
                    .with_stride([2, 1])
                    .with_padding([1, 0])
                    .with_dilation([1, 2])
            };
            let trial = Trial {
                name: format!("max_pool2d of {size:?}"),
                x: [2, 2, size[0], size[1]],
                weight: None,
                plain: &|x, _| module::max_pool2d(x, max()),
                sharded: &|x, _| sharded::max_pool2d(x, max()),
                reads: &|dim, o| window([3, 2][dim], [2, 1][dim], [1, 0][dim], [1, 2][dim])(o),
            };
            did.push(trial.run(mesh, &layout(mesh, &placements))?);
            let avg = || {
                let options = AvgPoolOptions::new([2, 3])
                    .with_stride([1, 2])
                    .with_padding([1, 1]);
                options.with_count_include_pad(false).with_ceil_mode(true)
            };
            let trial = Trial {
                name: format!("avg_pool2d of {size:?}"),
                x: [2, 2, size[0], size[1]],
                weight: None,
                plain: &|x, _| module::avg_pool2d(x, avg()),
                sharded: &|x, _| sharded::avg_pool2d(x, avg()),
                reads: &|dim, o| window([2, 3][dim], [1, 2][dim], 1, 1)(o),
            };
            did.push(trial.run(mesh, &layout(mesh, &placements))?);
        }
        Ok(did)
    });
    same_on_all(did);
}

/// Where an element of the output lies in the input, by burn's documented mapping.
fn sources(mode: &InterpolateMode, align: bool, from: usize, to: usize, o: usize) -> Vec<isize> {
    let (len, size, at) = (from as f64, to as f64, o as f64);
    let first = match (mode, align) {
        (InterpolateMode::Nearest, _) => return vec![(at * len / size).floor() as isize],
        (_, true) => at * (len - 1.0) / (size - 1.0).max(1.0),
        _ => ((at + 0.5) * len / size - 0.5).max(0.0),
    };
    // Of the second only where there is something of it.
    if first.fract() > 0.0 {
        vec![first.floor() as isize, first.floor() as isize + 1]
    } else {
        vec![first as isize]
    }
}

#[test]
fn interpolation_of_sharded_images_gets_its_halo_alone() {
    for (ranks, placements) in [
        (vec![3], vec![S(2)]),
        (vec![2], vec![S(3)]),
        (vec![2, 2], vec![S(2), S(3)]),
        (vec![4], vec![S(2)]),
    ] {
        let did = on_mesh(&ranks, |_, mesh| {
            let mut did = Vec::new();
            let modes = [
                (InterpolateMode::Nearest, true),
                (InterpolateMode::Bilinear, true),
                (InterpolateMode::Bilinear, false),
            ];
            let sizes = [
                [3, 4, 6, 8],
                [7, 5, 14, 10],
                [5, 6, 3, 4],
                [1, 2, 5, 1],
                [13, 3, 9, 7],
            ];
            for ((mode, align), [height, width, tall, wide]) in iproduct!(modes, sizes) {
                let options = || {
                    InterpolateOptions::new(mode.clone())
                        .with_align_corners(align)
                        .with_output_size([tall, wide])
                };
                let trial = Trial {
                    name: format!(
                        "interpolate {height} x {width} to {tall} x {wide}, {mode:?} {align}"
                    ),
                    x: [2, 2, height, width],
                    weight: None,
                    plain: &|x, _| module::interpolate(x, options()),
                    sharded: &|x, _| sharded::interpolate(x, options()),
                    reads: &|dim, o| {
                        sources(&mode, align, [height, width][dim], [tall, wide][dim], o)
                    },
                };
                did.push(trial.run(mesh, &layout(mesh, &placements))?);
            }
            Ok(did)
        });
        same_on_all(did);
    }
}

/// As unequal devices ask for: the output is cut in proportion.
#[test]
fn uneven_shards_stay_uneven() {
    let did = on_mesh(&[3], |_, mesh| {
        let mut did = Vec::new();
        for (lengths, stride, expected) in [
            ([6, 1, 5], 1, [6, 1, 5]),
            ([6, 0, 6], 2, [3, 0, 3]),
            ([1, 3, 8], 2, [1, 1, 4]),
            ([0, 12, 0], 3, [0, 4, 0]),
        ] {
            let layout = layout(mesh, &[S(2)]).with_uneven_sizes(0, lengths)?;
            let options = || ConvOptions::new([stride], [1], [1], 1);
            let trial = Trial {
                name: format!("conv1d of {lengths:?} by {stride}"),
                x: [2, 2, 12],
                weight: Some(([3, 2, 3], 3)),
                plain: &|x, params| {
                    params
                        .map(|(w, b)| module::conv1d(x, w, Some(b), options()))
                        .unwrap()
                },
                sharded: &|x, params| {
                    let y = params
                        .map(|(w, b)| sharded::conv1d(x, w, Some(b), options()))
                        .unwrap();
                    assert_eq!(y.layout().uneven_sizes(0).unwrap()[..], expected);
                    y
                },
                reads: &|_, o| window(3, stride, 1, 1)(o),
            };
            did.push(trial.run(mesh, &layout)?);
        }
        Ok(did)
    });
    same_on_all(did);
}

/// 5 / 3 is no number of single precision.
#[test]
fn averages_without_padding_are_of_double_precision_where_the_input_is() {
    let options = || {
        AvgPoolOptions::new([5])
            .with_stride([1])
            .with_padding_pairs([(2, 2)])
            .with_count_include_pad(false)
    };
    for ranks in [2, 3] {
        on_mesh(&[ranks], |_, mesh| {
            let full = Tensor::<3>::from_data(
                [[[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]]],
                (mesh.device(), DType::F64),
            );
            let expected = module::avg_pool1d(full.clone(), options())
                .into_data()
                .try_to_vec::<f64>()
                .unwrap();
            let x = DTensor::distribute_replicated(full, mesh, &[S(2)])?;
            let found = sharded::avg_pool1d(x, options());
            assert_eq!(found.placements(), [S(2)]);
            let found = found
                .full_tensor()?
                .into_data()
                .try_to_vec::<f64>()
                .unwrap();
            for (found, expected) in found.iter().zip(&expected) {
                assert!(
                    (found / expected - 1.0).abs() < 1e-14,
                    "{found} and {expected}"
                );
            }
            Ok(())
        });
    }
}
