//! Einstein summation.

use burn_dtensor::testing::prove::{Case, case};

pub fn cases() -> Vec<Case> {
    vec![
        case!("einsum", (a: 2 = [3, 4], b: 2 = [4, 2]) => Tensor::<2>::einsum("ij,jk->ik", [a.into(), b.into()])),
        case!("einsum", (a: 3 = [2, 3, 2], b: 3 = [2, 2, 4]) =>
            Tensor::<3>::einsum("bij,bjk->bik", [a.into(), b.into()])),
        case!("einsum", (a: 3 = [3, 2, 2], b: 2 = [2, 3]) =>
            Tensor::<3>::einsum("...ij,jk", [a.into(), b.into()])),
        case!("einsum", (a: 4 = [2, 1, 2, 3], b: 4 = [2, 2, 3, 1]) =>
            Tensor::<4>::einsum("bqhd,bhdk->bhqk", [a.into(), b.into()])),
        case!("einsum", (a: 1 = [4], b: 1 = [4]) => Tensor::<1>::einsum("i,i->", [a.into(), b.into()])),
        case!("einsum", (a: 1 = [4], b: 1 = [3]) => Tensor::<2>::einsum("i,j->ij", [a.into(), b.into()])),
        case!("einsum", (a: 2 = [5, 3], b: 2 = [4, 3]) => Tensor::<2>::einsum("ij,kj->ik", [a.into(), b.into()])),
        case!("einsum", (a: 2 = [3, 2], b: 3 = [2, 3, 1]) => Tensor::<2>::einsum("ij,jik->ji", [a.into(), b.into()])),
        case!("einsum", (a: 2 = [3, 3]) => Tensor::<1>::einsum("ii->i", [a.into()])),
        case!("einsum", (a: 4 = [3, 2, 3, 3]) => Tensor::<2>::einsum("ijii->ji", [a.into()])),
        case!("einsum", (a: 2 = [3, 3], b: 1 = [1]) => Tensor::<1>::einsum("ii,->", [a.into(), b.into()])),
        case!("einsum", (a: 2 = [3, 4]) => Tensor::<1>::einsum("ij->j", [a.into()])),
        case!("einsum", (a: 1 = [2], b: 2 = [2, 3], c: 1 = [3]) =>
            Tensor::<1>::einsum("i,ij,j->", [a.into(), b.into(), c.into()])),
        case!("einsum", (a: 2 int(5) = [2, 3], b: 2 int(5) = [3, 2]) =>
            Tensor::<2, Int>::einsum("ij,jk->ki", [a.into(), b.into()])),
    ]
}
