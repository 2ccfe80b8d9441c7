//! A reader goes from top to bottom: a closure is not named only to be passed in the next statement,
//! and a `let` binds one value.

use proc_macro2::{TokenStream, TokenTree};
use quote::ToTokens;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{Block, Expr, ExprCall, ExprMethodCall, File, ItemFn, ItemImpl, ItemMod, Pat, Stmt};

use crate::layers::{Tree, is_test};
use crate::lines;

/// Most such statements in a thousand lines of `src` that are not tests.
const MOST: f64 = 2.0;

#[test]
fn few_statements_read_from_their_end() {
    let src = crate::root().join("src");
    let tree = Tree::read(&src);
    let mut found = Vec::new();
    for (module, file) in tree.files() {
        for line in statements(file) {
            found.push(format!("{}:{line}", module.join("/")));
        }
    }
    let lines: usize = lines::of_folder(&src)
        .into_values()
        .map(|size| size.code)
        .sum();
    let rate = 1000.0 * found.len() as f64 / lines as f64;
    assert!(
        rate <= MOST,
        "{rate:.2} in a thousand of {lines} lines: {found:?}"
    );
}

#[test]
fn closures_and_tuples_are_found() {
    let found = |body: &str| {
        let text = format!(
            "fn f() {{\n{body}\n}}\n#[cfg(test)] mod tests {{ fn g() {{ let (a, b) = (1, 2); }} }}"
        );
        statements(&syn::parse_file(&text).expect("Rust"))
    };
    assert_eq!(found("let is = |x| x > 1;\nxs.iter().any(is)"), [2]);
    assert_eq!(found("let (a, b) = (1, 2);\na + b"), [2]);
    assert_eq!(found("if c { let (a, b): (u8, u8) = (1, 2); }"), [2]);
    for good in [
        "xs.iter().any(|x| x > 1)",
        "let is = |x| x > 1;\nxs.iter().any(is) || ys.iter().any(is)",
        "let is = |x| x > 1;\nlet y = 1;\nxs.iter().any(is)",
        "let is = |x| {\nx > 1\n};\nxs.iter().any(is)",
        "let is = |x| x > 1;\nis(y)",
        "let (a, b) = pair();",
    ] {
        assert_eq!(found(good), [0; 0], "{good}");
    }
}

/// Returns the lines of such statements in a file, outside tests.
fn statements(file: &File) -> Vec<usize> {
    let mut found = Statements(Vec::new());
    found.visit_file(file);
    found.0
}

struct Statements(Vec<usize>);

impl Visit<'_> for Statements {
    fn visit_item_mod(&mut self, item: &ItemMod) {
        if !is_test(&item.attrs) {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_fn(&mut self, item: &ItemFn) {
        if !is_test(&item.attrs) {
            visit::visit_item_fn(self, item);
        }
    }

    fn visit_item_impl(&mut self, item: &ItemImpl) {
        if !is_test(&item.attrs) {
            visit::visit_item_impl(self, item);
        }
    }

    fn visit_block(&mut self, block: &Block) {
        for (at, statement) in block.stmts.iter().enumerate() {
            let Stmt::Local(local) = statement else {
                continue;
            };
            let Some(init) = &local.init else { continue };
            let pattern = match &local.pat {
                Pat::Type(typed) => &*typed.pat,
                pattern => pattern,
            };
            let rest = &block.stmts[at + 1..];
            let is_found = match (pattern, &*init.expr) {
                (Pat::Tuple(_), Expr::Tuple(_)) => true,
                (Pat::Ident(name), Expr::Closure(closure)) => {
                    let span = closure.span();
                    span.start().line == span.end().line && is_passed(&name.ident.to_string(), rest)
                }
                _ => false,
            };
            if is_found {
                self.0.push(local.span().start().line);
            }
        }
        visit::visit_block(self, block);
    }
}

/// Returns true if the statements name `name` once, as an argument in the first of them.
fn is_passed(name: &str, statements: &[Stmt]) -> bool {
    let named: usize = statements
        .iter()
        .map(|statement| count(statement.to_token_stream(), name))
        .sum();
    let Some(next) = statements.first() else {
        return false;
    };
    let mut arguments = Arguments { name, count: 0 };
    arguments.visit_stmt(next);
    named == 1 && arguments.count == 1
}

fn count(tokens: TokenStream, name: &str) -> usize {
    let mut named = 0;
    for token in tokens {
        named += match token {
            TokenTree::Ident(ident) => usize::from(ident == name),
            TokenTree::Group(group) => count(group.stream(), name),
            TokenTree::Punct(_) | TokenTree::Literal(_) => 0,
        };
    }
    named
}

/// Number of arguments that are this name.
struct Arguments<'a> {
    name: &'a str,
    count: usize,
}

impl Arguments<'_> {
    fn add<'a>(&mut self, arguments: impl Iterator<Item = &'a Expr>) {
        for argument in arguments {
            if let Expr::Path(path) = argument
                && path.path.is_ident(self.name)
            {
                self.count += 1;
            }
        }
    }
}

impl Visit<'_> for Arguments<'_> {
    fn visit_expr_call(&mut self, call: &ExprCall) {
        self.add(call.args.iter());
        visit::visit_expr_call(self, call);
    }

    fn visit_expr_method_call(&mut self, call: &ExprMethodCall) {
        self.add(call.args.iter());
        visit::visit_expr_method_call(self, call);
    }
}
