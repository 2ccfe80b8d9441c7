//! Pictures of layouts.

use burn_dtensor::debug::visualize_model;
use burn_dtensor::dtensor::visualize_sharding;
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::Mlp;
use Placement::{Replicate as R, Shard as S};

#[test]
fn a_models_layout_shows_each_parameter_on_its_ranks() {
    let pages = MeshTest::new([2, 2], ["dp", "tp"]).run(|mesh| {
        let mlp = Mlp::on(mesh, mesh.device())?;
        let layout = visualize_model(&mlp);
        Ok((layout.to_string(), layout.to_html()))
    });
    let (text, html) = &pages[0];
    // By columns over tp, then by rows over dp.
    let weight = "\
up.weight: [8, 12] f32 on DeviceMesh(dp=2, tp=2; ranks 0..4): [S(0), S(1)]

       0..6   6..12
     +------+-------+
0..4 | 0    | 1     |
     +------+-------+
4..8 | 2    | 3     |
     +------+-------+
";
    assert!(text.starts_with(weight), "{text}");
    assert!(text.contains("\ndown.weight: [12, 8] f32"), "{text}");
    assert!(
        pages.iter().all(|page| page == &pages[0]),
        "every rank says the same"
    );
    // A band for each rank that holds a cell: of 3 parameters one each; and one for what each has
    // in all.
    assert_eq!(html.matches("<title>rank ").count(), 3 * 4, "{html}");
    assert_eq!(html.matches("<td>51 elements").count(), 4, "{html}"); // (96 + 96 + 12) / 4
    assert!(
        html.contains(
            "<p>[8, 12] f32 on DeviceMesh(dp=2, tp=2; ranks 0..4): [S(0), S(1)]<br>unit up</p>"
        ),
        "{html}"
    );
    let (opened, closed) = (html.matches("<svg").count(), html.matches("</svg>").count());
    assert_eq!((opened, closed), (4 + 3, 4 + 3));
}

#[test]
fn an_ordinary_model_is_every_ranks_own() {
    MeshTest::new([1], ["dp"]).run(|mesh| {
        let layer = burn::nn::LinearConfig::new(3, 2)
            .with_bias(false)
            .init(mesh.device());
        assert_eq!(
            visualize_model(&layer).to_string(),
            "weight: [3, 2], separate on every rank\n"
        );
        assert!(
            visualize_model(&layer)
                .to_html()
                .contains("separate on every rank")
        );
        Ok(())
    });
}

/// Of three dimensions those that are cut are drawn; ranks without elements are named.
#[test]
fn more_than_two_dimensions_are_drawn_where_they_are_sharded() {
    MeshTest::new([3], ["tp"]).run(|mesh| {
        let x = DTensor::<3>::ones([2, 4, 4], mesh, &[S(2)], mesh.device())?;
        let text = "\
[2, 4, 4] f32 on DeviceMesh(tp=3; ranks 0..3): [S(2)]

dim 0 down, dim 2 across
       0..2   2..4
     +------+------+
0..2 | 0    | 1    |
     +------+------+
empty: 2
";
        assert_eq!(visualize_sharding(x.spec()), text);
        let full = DTensor::<3>::ones([2, 1, 4], mesh, &[R], mesh.device())?;
        assert!(visualize_sharding(full.spec()).contains("dim 0 down, dim 1 across"));
        Ok(())
    });
    MeshTest::new([1, 1, 1], ["a", "b", "c"]).run(|mesh| {
        let x = DTensor::<3>::ones([2, 4, 4], mesh, &[S(0), S(1), S(2)], mesh.device())?;
        assert_eq!(
            visualize_sharding(x.spec()).lines().count(),
            1,
            "three cuts are no plane"
        );
        Ok(())
    });
}
