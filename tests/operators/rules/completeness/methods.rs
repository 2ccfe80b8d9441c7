//! The methods of burn's `Tensor` and of `DTensor`, by kind of elements: `Tensor::abs of Int`.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use syn::{
    GenericArgument, GenericParam, ImplItem, Item, ItemImpl, PathArguments, Type, TypeParamBound,
    Visibility, WherePredicate,
};

use super::super::list::{files, macro_bodies, names_of_macro, tokens};
use super::sources::{is_test, of_crate, parsed};

/// Those of burn.
pub fn of_burn() -> BTreeSet<String> {
    let api = of_crate("burn-tensor").join("tensor/api");
    files(&api)
        .iter()
        .flat_map(|path| in_file(path, "Tensor", &[]))
        .collect()
}

/// Ours.
pub fn ours() -> BTreeSet<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/dtensor");
    let files: Vec<PathBuf> = files(&folder);
    let sources: Vec<Vec<String>> = files
        .iter()
        .map(|path| tokens(&fs::read_to_string(path).expect("a source")))
        .collect();
    let bodies: Vec<(&str, &[String])> = sources
        .iter()
        .flat_map(|source| macro_bodies(source))
        .collect();
    files
        .iter()
        .flat_map(|path| in_file(path, "DTensor", &bodies))
        .collect()
}

fn in_file(path: &Path, tensor: &str, macros: &[(&str, &[String])]) -> Vec<String> {
    let mut methods = Vec::new();
    for item in parsed(path).items {
        let Item::Impl(block) = item else { continue };
        let Some(kinds) =
            kinds(&block, tensor).filter(|_| block.trait_.is_none() && !is_test(&block.attrs))
        else {
            continue;
        };
        for name in block.items.iter().flat_map(|item| names(item, macros)) {
            methods.extend(kinds.iter().map(|kind| format!("Tensor::{name} of {kind}")));
        }
    }
    methods
}

/// What an item of a block makes public.
fn names(item: &ImplItem, macros: &[(&str, &[String])]) -> Vec<String> {
    match item {
        ImplItem::Fn(method) if matches!(method.vis, Visibility::Public(_)) => {
            vec![method.sig.ident.to_string()]
        }
        ImplItem::Macro(invoked) => {
            let name = invoked
                .mac
                .path
                .segments
                .last()
                .expect("a name")
                .ident
                .to_string();
            let (_, body) = macros
                .iter()
                .find(|(known, _)| *known == name)
                .expect("a macro of the operators");
            names_of_macro(body, &tokens(&invoked.mac.tokens.to_string()))
        }
        _ => Vec::new(),
    }
}

/// The kinds of elements that a block is about, if it is about `tensor`.
fn kinds(block: &ItemImpl, tensor: &str) -> Option<&'static [&'static str]> {
    let Type::Path(own) = &*block.self_ty else {
        return None;
    };
    let own = own
        .path
        .segments
        .last()
        .filter(|segment| segment.ident == tensor)?;
    let PathArguments::AngleBracketed(arguments) = &own.arguments else {
        return None;
    };
    let Some(GenericArgument::Type(Type::Path(kind))) = arguments.args.iter().nth(1) else {
        return Some(&["Float"]);
    };
    let kind = kind.path.get_ident()?.to_string();
    match kind.as_str() {
        "Float" => return Some(&["Float"]),
        "Int" => return Some(&["Int"]),
        "Bool" => return Some(&["Bool"]),
        _ => {}
    }
    let of_parameters = block
        .generics
        .params
        .iter()
        .filter_map(|parameter| match parameter {
            GenericParam::Type(parameter) if parameter.ident == kind => Some(&parameter.bounds),
            _ => None,
        });
    let clauses = block
        .generics
        .where_clause
        .iter()
        .flat_map(|clause| &clause.predicates);
    let of_clauses = clauses.filter_map(|clause| match clause {
        WherePredicate::Type(clause) => {
            matches!(&clause.bounded_ty, Type::Path(path) if path.path.is_ident(&kind))
                .then_some(&clause.bounds)
        }
        _ => None,
    });
    let bounds = of_parameters
        .chain(of_clauses)
        .flatten()
        .filter_map(|bound| match bound {
            TypeParamBound::Trait(bound) => Some(bound.path.segments.last()?.ident.to_string()),
            _ => None,
        });
    let of_bound = |bound: String| -> &'static [&'static str] {
        match bound.as_str() {
            "Basic" | "Kind" | "Autodiff" | "Transaction" => &["Bool", "Float", "Int"],
            "Numeric" | "Ordered" => &["Float", "Int"],
            "FloatMath" => &["Float"],
            other => panic!("of which kinds is `{other}`?"),
        }
    };
    bounds.map(of_bound).min_by_key(|kinds| kinds.len())
}
