//! What a DTensor says of itself.

use burn::tensor::{DType, Device, Shape};
use burn_dtensor::dtensor::{DTensor, DTensorSpec, visualize_sharding};
use burn_dtensor::placement::Layout;

use super::{R, S, on_mesh};

#[test]
fn a_tensor_and_its_spec_say_what_they_are() {
    let text = on_mesh(&[2, 2], |_, mesh| {
        let x = DTensor::<2>::zeros([8, 16], mesh, &[S(0), R], &Device::flex())?;
        let spec = x.spec().with_layout(Layout::new(&[2, 2], &[S(0), S(1)])?)?;
        let line = Layout::new(&[2, 2], &[S(0), S(0)])?;
        let line = DTensorSpec::new(mesh, line, Shape::from([5]), DType::I64)?;
        Ok((
            x.to_string(),
            format!("{x:?}"),
            visualize_sharding(&spec),
            visualize_sharding(x.spec()),
            visualize_sharding(&line),
        ))
    });
    let (display, debug, cells, rows, line) = &text[0];
    assert_eq!(
        display,
        "DTensor[8, 16] f32 on DeviceMesh(a=2, b=2; ranks 0..4): [S(0), R], local [4, 16]"
    );
    assert_eq!(display, debug);
    assert_eq!(
        cells,
        "\
[8, 16] f32 on DeviceMesh(a=2, b=2; ranks 0..4): [S(0), S(1)]

       0..8   8..16
     +------+-------+
0..4 | 0    | 1     |
     +------+-------+
4..8 | 2    | 3     |
     +------+-------+
"
    );
    assert!(
        rows.contains("| 0 1   |\n") && rows.contains("| 2 3   |\n"),
        "{rows}"
    );
    assert!(line.contains("0..2   2..3   3..4   4..5"), "{line}");
    assert!(line.contains("| 0    | 1    | 2    | 3    |"), "{line}");
}
