//! The rules of a manifest by brute force over elements and bytes, for tests and for fuzzing.

use std::collections::{BTreeMap, BTreeSet};

use crate::checkpoint::manifest::{BLOCK, Manifest};

/// Returns the indices of all elements of a box in row-major order.
fn elements(offsets: &[usize], shape: &[usize]) -> Vec<Vec<usize>> {
    offsets
        .iter()
        .zip(shape)
        .fold(vec![Vec::new()], |all, (&offset, &len)| {
            let longer = |index: &Vec<usize>| {
                let index = index.clone();
                (offset..offset + len).map(move |last| [index.as_slice(), &[last]].concat())
            };
            all.iter().flat_map(longer).collect()
        })
}

/// Checks what a reader relies on. Tensors of more than 10,000 elements are not looked at.
pub fn assert_valid(manifest: &Manifest) {
    let mut names = BTreeSet::new();
    for file in &manifest.files {
        let name = std::path::Path::new(&file.name);
        assert_eq!(
            name.file_name(),
            Some(name.as_os_str()),
            "a name leads elsewhere"
        );
        assert!(
            names.insert(&file.name) && !file.name.contains(['/', '\\', '\0']),
            "{}",
            file.name
        );
    }
    let ranks: u128 = manifest.mesh.shape.iter().map(|&len| len as u128).product();
    assert!(
        ranks > 0
            && ranks <= usize::MAX as u128
            && manifest.mesh.names.len() == manifest.mesh.shape.len()
    );
    assert!(
        manifest
            .rank_values
            .values()
            .all(|values| values.len() as u128 == ranks)
    );
    let mut bytes: BTreeMap<usize, Vec<(u128, u128)>> = BTreeMap::new();
    for (key, tensor) in &manifest.tensors {
        let elements_of = |shape: &[usize]| shape.iter().map(|&len| len as f64).product::<f64>();
        let large = elements_of(&tensor.shape) > 1e4;
        let mut covered = BTreeSet::new();
        for chunk in &tensor.chunks {
            let offsets = &chunk.region.offsets;
            let shape = &chunk.region.shape;
            assert_eq!(
                (offsets.len(), shape.len()),
                (tensor.shape.len(), tensor.shape.len()),
                "{key}"
            );
            for ((&offset, &len), &of) in offsets.iter().zip(shape).zip(&tensor.shape) {
                assert!(
                    len > 0 && offset as u128 + len as u128 <= of as u128,
                    "{key}"
                );
            }
            let count: u128 = shape.iter().map(|&len| len as u128).product();
            let len = count * tensor.dtype.bytes() as u128;
            assert!(
                chunk.begin as u128 + len <= manifest.files[chunk.file].len as u128,
                "{key}"
            );
            assert_eq!(
                chunk.checksums.len() as u128,
                len.div_ceil(BLOCK as u128),
                "{key}"
            );
            bytes
                .entry(chunk.file)
                .or_default()
                .push((chunk.begin.into(), chunk.begin as u128 + len));
            if !large {
                assert!(
                    elements(offsets, shape)
                        .into_iter()
                        .all(|element| covered.insert(element)),
                    "twice: {key}"
                );
            }
        }
        let expected = if tensor.shape.contains(&0) {
            0
        } else {
            tensor.shape.iter().product()
        };
        assert!(
            large || covered.len() == expected,
            "{key}: {} of {expected} elements",
            covered.len()
        );
    }
    for ranges in bytes.values_mut() {
        ranges.sort_unstable();
        assert!(
            ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0),
            "bytes of two chunks"
        );
    }
}
