//! Collective or local: a public function that ranks call says which it is.

use std::collections::{BTreeMap, BTreeSet};

use itertools::Itertools;
use proc_macro2::{TokenStream, TokenTree};
use quote::{ToTokens, quote};
use syn::{
    Attribute, Expr, Fields, FnArg, Ident, ImplItem, Item, ItemImpl, Lit, Meta, ReturnType,
    Signature, TraitItem, Type, Visibility,
};

use crate::layers::{Module, Tree, Used, flatten, is_test};

/// Types and traits through which a rank communicates. So does a type with a field that names one
/// of them: a mesh holds communicators, and a DTensor holds its mesh.
const HANDLES: [&str; 5] = ["Communicator", "Module", "Param", "Unit", "World"];

/// Types that count as handles without such a field, and why.
const OTHER_HANDLES: [(&str, &str); 5] = [
    ("ClipGradNorm", "it reads the gradients of a model"),
    ("DistributedSampler", "it decides the steps of all ranks"),
    ("GradScaler", "it decides whether all ranks step"),
    ("ShardedOptimizer", "it steps a model"),
    ("Work", "it waits for other ranks"),
];

/// Modules whose functions the programs of ranks do not call, and why.
const NOT_OF_RANKS: [(&str, &str); 14] = [
    ("comm/backend", "the interface below communicators"),
    ("comm/host_backend", "called before a process has ranks"),
    ("comm/simulated_gpus", "launches ranks"),
    ("comm/transport", "the interface below backends"),
    ("memory/counted", "counts the memory of a process"),
    ("memory/gpu", "names a device"),
    ("placement", "arithmetic that knows no ranks"),
    ("testing/conformance", "launches ranks"),
    ("testing/copies", "runs on one thread"),
    ("testing/loopback", "runs processes"),
    ("testing/mesh_test", "launches ranks"),
    ("testing/process_mesh_test", "launches processes"),
    ("testing/process_test", "launches processes"),
    ("testing/prove", "launches ranks"),
];

/// Title of the section that says which ranks must call a function.
const TITLE: &str = "# Collective";

/// Words that follow `Local` or `Collective` at the beginning of a sentence that says it.
const CONTINUATIONS: [&str; 6] = ["except", "for", "if", "like", "on", "unless"];

/// Number of covered functions below which the sources are not read as they should be.
const FEWEST: usize = 400;

/// A public function is covered if it is a free function, if it returns a `Result` or a `Work`, or
/// if its receiver, its arguments or its result name a handle of a rank: one of [`HANDLES`] and
/// [`OTHER_HANDLES`], or a type that holds one. Other functions have nothing to communicate with.
///
/// Exceptions are:
/// - constructors and builders, which only make a value: `new`, `default` and `with_*` that return
///   `Self`;
/// - accessors, which return a property: `&self` is the only argument, and the result is neither a
///   `Result` nor, by value, a handle;
/// - methods of error types, hidden functions, and the modules of [`NOT_OF_RANKS`].
///
/// A function says it in its own documentation or in that of its impl block, its type or its trait,
/// by a section `# Collective` or a sentence such as "Local.", "Local: no communication.", "Local,
/// except for .." or "Collective like ..". A section of a public module inside a top-level one
/// speaks for free functions, and for methods of types that other modules define: that of
/// `dtensor::ops` for the operators.
///
/// Public is what `pub mod` and `pub use` reach from the root of the crate, with any features. The
/// impl blocks of a type are found by its name, so methods of a private type with the name of
/// something public are covered, too. A function that a macro defines is covered once, in the module
/// of the macro. Implementations of traits are not read.
#[test]
fn public_functions_say_whether_they_are_collective() {
    let tree = Tree::read(&crate::root().join("src"));
    let functions = Api::new(&tree).functions();
    let lacking = lacking(&functions);
    assert!(
        lacking.is_empty(),
        "{} of {} do not say it:\n{}",
        lacking.len(),
        functions.len(),
        lacking.join("\n")
    );
    assert!(functions.len() >= FEWEST, "only {}", functions.len());
}

#[test]
fn exceptions_exist() {
    let tree = Tree::read(&crate::root().join("src"));
    let api = Api::new(&tree);
    for (name, _) in OTHER_HANDLES {
        assert!(api.is_named(name), "{name} is not public");
    }
    for (at, _) in NOT_OF_RANKS {
        let mut modules = api.modules.keys();
        assert!(modules.any(|module| module.join("/") == at), "no {at}");
    }
}

#[test]
fn a_function_that_does_not_say_it_is_found() {
    let sources = [
        (
            "lib.rs",
            "pub mod mesh; mod inner; pub use inner::{Reader, gather as all_gather};",
        ),
        (
            "mesh/mod.rs",
            "//! # Collective
            mod group; pub mod ops; pub use group::Group;
            pub struct Mesh { world: Vec<World> }
            impl Mesh {
                pub fn size(&self) -> usize { 1 }
                pub fn with_name(self) -> Self { self }
                /// Local tensors are summed.
                pub fn sum(&self, x: f32) -> f32 { x }
                /// Returns a part. Local.
                pub fn slice(&self) -> Result<Self> { todo!() }
                /// # Collective
                pub fn barrier(&self) {}
                #[doc(hidden)]
                pub fn hidden(&self) {}
                fn private(&self) {}
            }",
        ),
        (
            "mesh/group.rs",
            "pub struct Group; impl Group { pub fn like(mesh: &Mesh) {} pub fn ranks(self) {} }
            pub struct Private; impl Private { pub fn wait(self) -> Result<()> { todo!() } }",
        ),
        (
            "mesh/ops.rs",
            "//! # Collective
            pub fn add(x: Mesh) {}
            impl Group { pub fn exp<M>(self) where M: Module {} }
            pub struct Rule; impl Rule { pub fn resolve() -> Result<()> { todo!() } }",
        ),
        (
            "inner.rs",
            "pub fn gather() {} pub fn scatter() {}
            /// Local.
            pub trait Reader { fn read(&self) -> Result<()>; }
            macro_rules! readers { () => { pub fn reader() {} } }
            #[cfg(test)] mod tests { pub fn test() {} }",
        ),
    ];
    let tree = Tree::new(sources.map(|(path, text)| (path, text.to_owned())));
    let functions = Api::new(&tree).functions();
    assert_eq!(
        lacking(&functions),
        [
            "inner::gather",
            "inner::reader",
            "mesh::Mesh::sum",
            "mesh::group::Group::like",
            "mesh::ops::Rule::resolve",
        ]
    );
    let said = functions.iter().filter(|function| function.is_said);
    assert_eq!(
        said.map(|function| &function.name).collect_vec(),
        [
            "inner::Reader::read",
            "mesh::Mesh::slice",
            "mesh::Mesh::barrier",
            "mesh::ops::add",
            "mesh::ops::Group::exp",
        ]
    );
}

#[test]
fn sentences_that_say_it_are_recognized() {
    for text in [
        "Waits.\n\n# Collective\nEvery rank.",
        "Returns the group. Local.",
        "Local: no\ncommunication.",
        "Local, except for Muon.",
        "Local; every rank passes the same.",
        "Collective\nlike `step`.",
        "Local unless the launch checks replicas.",
    ] {
        assert!(says(text), "{text}");
    }
    for text in [
        "Returns the local tensor.",
        "Local tensors are summed.",
        "# Collectives of tensors",
        "Collectives wait.",
        "It is local.",
    ] {
        assert!(!says(text), "{text}");
    }
}

/// Returns the names of the functions that do not say it.
fn lacking(functions: &[Function]) -> Vec<&str> {
    let lacking = functions.iter().filter(|function| !function.is_said);
    lacking.map(|function| function.name.as_str()).collect()
}

/// A covered function.
struct Function {
    /// Path, with the module of the source file.
    name: String,
    /// True if it says whether it is collective.
    is_said: bool,
}

/// Attributes and items of a module.
struct ModuleItems<'a> {
    attributes: &'a [Attribute],
    items: &'a [Item],
}

/// Public items, each with the module whose items contain it. `*` is the module itself.
type Public = BTreeSet<(Module, String)>;

/// The public interface of a crate.
struct Api<'a> {
    modules: BTreeMap<Module, ModuleItems<'a>>,
    public: Public,
    /// Module and documentation of each type and trait.
    types: BTreeMap<String, (&'a Module, String)>,
    handles: BTreeSet<String>,
}

impl<'a> Api<'a> {
    fn new(tree: &'a Tree) -> Self {
        let others = OTHER_HANDLES.map(|(name, _)| name);
        let handles = HANDLES.into_iter().chain(others);
        let mut api = Self {
            modules: BTreeMap::new(),
            public: Public::new(),
            types: BTreeMap::new(),
            handles: handles.map(String::from).collect(),
        };
        for (module, file) in tree.files() {
            for found in file.items.iter().filter_map(definition) {
                let docs = docs(found.attributes);
                api.types.insert(found.ident.to_string(), (module, docs));
            }
            api.add(module.clone(), &file.attrs, &file.items);
        }
        let mut public = Public::new();
        api.expose(&Module::new(), None, &mut public);
        api.public = public;
        while api.add_handles() {}
        api
    }

    /// Adds a module, and those inside it in the same file.
    fn add(&mut self, module: Module, attributes: &'a [Attribute], items: &'a [Item]) {
        for item in items {
            if let Item::Mod(inner) = item
                && !is_test(&inner.attrs)
                && let Some((_, items)) = &inner.content
            {
                self.add(inside(&module, &inner.ident), &inner.attrs, items);
            }
        }
        self.modules
            .insert(module, ModuleItems { attributes, items });
    }

    /// Adds to `public` the item `wanted` of a module, or all its public items. If an item is a
    /// module, its public items are added, too.
    fn expose(&self, module: &Module, wanted: Option<&str>, public: &mut Public) {
        let Some(found) = self.modules.get(module) else {
            return;
        };
        if !public.insert((module.clone(), wanted.unwrap_or("*").to_owned())) {
            return;
        }
        let is_wanted = |visibility: &Visibility, name: &str| match wanted {
            Some(wanted) => name == wanted,
            None => is_public(visibility),
        };
        for item in found.items {
            let (visibility, ident) = match item {
                Item::Use(item) => {
                    let mut names = Vec::new();
                    flatten(&item.tree, &mut Vec::new(), &mut names);
                    names.retain(|used| is_wanted(&item.vis, &used.name));
                    for used in names {
                        let (at, name) = resolve(module, &used);
                        self.expose(&at, Some(name), public);
                    }
                    continue;
                }
                Item::Mod(item) if is_test(&item.attrs) => continue,
                Item::Mod(item) => (&item.vis, &item.ident),
                Item::Fn(item) => (&item.vis, &item.sig.ident),
                _ => match definition(item) {
                    Some(found) => (found.visibility, found.ident),
                    None => continue,
                },
            };
            if is_wanted(visibility, &ident.to_string()) {
                public.insert((module.clone(), ident.to_string()));
                if matches!(item, Item::Mod(_)) {
                    self.expose(&inside(module, ident), None, public);
                }
            }
        }
    }

    /// Returns true if something public has this name.
    fn is_named(&self, name: &str) -> bool {
        self.public.iter().any(|(_, public)| public == name)
    }

    /// Adds the types with a field that names a handle. Returns true if there were any.
    fn add_handles(&mut self) -> bool {
        let items = self.modules.values().flat_map(|contents| contents.items);
        let holders = items.filter(|item| self.is_holder(item));
        let holders: Vec<_> = holders
            .filter_map(|item| Some(definition(item)?.ident.to_string()))
            .collect();
        let before = self.handles.len();
        self.handles.extend(holders);
        self.handles.len() > before
    }

    fn is_holder(&self, item: &Item) -> bool {
        let fields: Vec<&Fields> = match item {
            Item::Struct(item) => vec![&item.fields],
            Item::Enum(item) => item.variants.iter().map(|it| &it.fields).collect(),
            _ => Vec::new(),
        };
        let mut fields = fields.into_iter().flatten();
        fields.any(|field| self.names_handle(field.ty.to_token_stream()))
    }

    fn names_handle(&self, tokens: TokenStream) -> bool {
        any_ident(tokens, &|ident| self.handles.contains(&ident.to_string()))
    }

    /// Returns the covered functions.
    fn functions(&self) -> Vec<Function> {
        let mut found = Vec::new();
        for (module, contents) in &self.modules {
            for item in contents.items {
                self.functions_of(module, item, &mut found);
            }
        }
        found
    }

    /// Adds the covered functions that an item defines.
    fn functions_of(&self, module: &Module, item: &Item, found: &mut Vec<Function>) {
        let is_exposed = |ident: &Ident| {
            let key = (module.clone(), ident.to_string());
            self.public.contains(&key)
        };
        match item {
            Item::Fn(item) if is_exposed(&item.sig.ident) => {
                let function = Candidate::new(None, &item.sig, &item.attrs, &[]);
                found.extend(self.covered(module, &function));
            }
            Item::Trait(item) if is_exposed(&item.ident) => {
                for inner in &item.items {
                    if let TraitItem::Fn(inner) = inner {
                        let owner = Some(item.ident.to_string());
                        let function = Candidate::new(owner, &inner.sig, &inner.attrs, &[]);
                        found.extend(self.covered(module, &function));
                    }
                }
            }
            Item::Impl(item) => {
                let owner = owner(item).filter(|owner| self.is_named(owner));
                for inner in &item.items {
                    if let ImplItem::Fn(inner) = inner
                        && is_public(&inner.vis)
                        && owner.is_some()
                    {
                        let owner = owner.clone();
                        let function = Candidate::new(owner, &inner.sig, &inner.attrs, &item.attrs);
                        found.extend(self.covered(module, &function));
                    }
                }
            }
            Item::Macro(item) => found.extend(defined_by(&item.mac.tokens).map(|name| Function {
                name: format!("{}::{name}", module.join("::")),
                is_said: self.is_said_by_module(module, None),
            })),
            _ => {}
        }
    }

    /// Returns the function if it is covered.
    fn covered(&self, module: &Module, function: &Candidate<'_>) -> Option<Function> {
        let path = format!("{}/", module.join("/"));
        let is_of_ranks = !NOT_OF_RANKS
            .iter()
            .any(|(at, _)| path.starts_with(&format!("{at}/")));
        if !is_of_ranks || !self.is_covered(function) {
            return None;
        }
        let of_type = function.owner.as_ref().and_then(|it| self.types.get(it));
        let is_said = says(&docs(function.attributes))
            || says(&docs(function.around))
            || of_type.is_some_and(|(_, docs)| says(docs))
            || self.is_said_by_module(module, of_type.map(|(module, _)| *module));
        let owner = function.owner.as_ref().map(|owner| format!("{owner}::"));
        let (owner, ident) = (owner.unwrap_or_default(), &function.signature.ident);
        Some(Function {
            name: format!("{}::{owner}{ident}", module.join("::")),
            is_said,
        })
    }

    fn is_covered(&self, function: &Candidate<'_>) -> bool {
        let owner = function.owner.as_deref();
        let is_of_handle = owner.is_some_and(|owner| self.handles.contains(owner));
        let names_handle = |tokens: TokenStream| {
            self.names_handle(tokens.clone())
                || is_of_handle && any_ident(tokens, &|ident| ident == "Self")
        };
        let output = function.output();
        let makes_handle = output.is_some_and(|output| {
            !matches!(output, Type::Reference(_)) && names_handle(output.to_token_stream())
        });
        let is_accessor = function.is_getter() && !function.returns_result() && !makes_handle;
        let is_error = owner.is_some_and(|owner| owner.ends_with("Error"));
        if is_accessor || is_error || function.is_builder() || function.is_hidden() {
            return false;
        }
        owner.is_none()
            || function.returns_result()
            || is_of_handle && function.signature.receiver().is_some()
            || names_handle(function.types())
    }

    /// Returns true if a public module inside a top-level one, `module` or one around it, has a
    /// section for methods of types of the module `of_type`, or for free functions.
    fn is_said_by_module(&self, module: &Module, of_type: Option<&Module>) -> bool {
        let around = (2..=module.len()).map(|len| module[..len].to_vec());
        let mut speaking = around.filter(|around| {
            let is_of_other = of_type.is_none_or(|of_type| !of_type.starts_with(around));
            is_of_other && self.public.contains(&(around.clone(), "*".into()))
        });
        speaking.any(|around| has_section(&docs(self.modules[&around].attributes)))
    }
}

/// A public function, which may be covered.
struct Candidate<'a> {
    /// Type or trait of a method.
    owner: Option<String>,
    signature: &'a Signature,
    attributes: &'a [Attribute],
    /// Attributes of the impl block.
    around: &'a [Attribute],
}

impl<'a> Candidate<'a> {
    fn new(
        owner: Option<String>,
        signature: &'a Signature,
        attributes: &'a [Attribute],
        around: &'a [Attribute],
    ) -> Self {
        Self {
            owner,
            signature,
            attributes,
            around,
        }
    }

    fn output(&self) -> Option<&Type> {
        match &self.signature.output {
            ReturnType::Default => None,
            ReturnType::Type(_, output) => Some(output),
        }
    }

    /// Returns the types of the arguments and of the result, with the bounds of generic ones.
    fn types(&self) -> TokenStream {
        let inputs = self.signature.inputs.iter();
        let arguments = inputs.filter(|input| matches!(input, FnArg::Typed(_)));
        let (generics, output) = (&self.signature.generics, &self.signature.output);
        let bounds = &generics.where_clause;
        quote!(#(#arguments)* #generics #output #bounds)
    }

    fn returns_result(&self) -> bool {
        let Some(Type::Path(path)) = self.output() else {
            return false;
        };
        let last = path.path.segments.last();
        last.is_some_and(|last| last.ident == "Result" || last.ident == "Work")
    }

    /// Returns true if `&self` is the only argument.
    fn is_getter(&self) -> bool {
        let receiver = self.signature.receiver();
        let is_shared = |it: &syn::Receiver| it.reference.is_some() && it.mutability.is_none();
        self.signature.inputs.len() == 1
            && receiver.is_some_and(is_shared)
            && self.output().is_some()
    }

    fn is_builder(&self) -> bool {
        let name = self.signature.ident.to_string();
        let is_made = name == "new" || name == "default" || name.starts_with("with_");
        let output = self.output().map(|output| output.to_token_stream());
        is_made && output.is_some_and(|output| output.to_string() == "Self")
    }

    fn is_hidden(&self) -> bool {
        self.attributes.iter().any(|attribute| {
            let path = attribute.parse_args::<syn::Path>();
            attribute.path().is_ident("doc") && path.is_ok_and(|path| path.is_ident("hidden"))
        })
    }
}

/// Definition of a type or a trait.
struct Definition<'a> {
    visibility: &'a Visibility,
    ident: &'a Ident,
    attributes: &'a [Attribute],
}

fn definition(item: &Item) -> Option<Definition<'_>> {
    let (visibility, ident, attributes) = match item {
        Item::Enum(item) => (&item.vis, &item.ident, &item.attrs),
        Item::Struct(item) => (&item.vis, &item.ident, &item.attrs),
        Item::Trait(item) => (&item.vis, &item.ident, &item.attrs),
        _ => return None,
    };
    Some(Definition {
        visibility,
        ident,
        attributes,
    })
}

/// Returns the type of an impl block that implements no trait.
fn owner(item: &ItemImpl) -> Option<String> {
    match &*item.self_ty {
        Type::Path(path) if item.trait_.is_none() => {
            Some(path.path.segments.last()?.ident.to_string())
        }
        _ => None,
    }
}

/// Returns the names of the public functions in a `macro_rules!`.
fn defined_by(tokens: &TokenStream) -> impl Iterator<Item = String> {
    let text = tokens.to_string();
    let functions = text.split("pub fn ").skip(1);
    let names = functions.map(|rest| rest.split(['(', '<']).next().unwrap_or_default());
    let names: Vec<_> = names.map(|name| name.replace(' ', "")).collect();
    names.into_iter()
}

/// Returns the module and the name of what `module` uses.
fn resolve<'a>(module: &Module, used: &'a Used) -> (Module, &'a str) {
    let (name, path) = used.path.split_last().expect("a path has a name");
    let mut at = module.clone();
    for part in path {
        match part.as_str() {
            "crate" => at.clear(),
            "self" => {}
            "super" => _ = at.pop(),
            _ => at.push(part.clone()),
        }
    }
    (at, name)
}

fn inside(module: &Module, ident: &Ident) -> Module {
    [&module[..], &[ident.to_string()]].concat()
}

fn is_public(visibility: &Visibility) -> bool {
    matches!(visibility, Visibility::Public(_))
}

/// Returns true if `is_found` is true for an identifier.
fn any_ident(tokens: TokenStream, is_found: &dyn Fn(&Ident) -> bool) -> bool {
    tokens.into_iter().any(|token| match token {
        TokenTree::Ident(ident) => is_found(&ident),
        TokenTree::Group(group) => any_ident(group.stream(), is_found),
        TokenTree::Punct(_) | TokenTree::Literal(_) => false,
    })
}

/// Returns the documentation in these attributes.
fn docs(attributes: &[Attribute]) -> String {
    let text = |attribute: &Attribute| match &attribute.meta {
        Meta::NameValue(meta) if meta.path.is_ident("doc") => match &meta.value {
            Expr::Lit(value) => match &value.lit {
                Lit::Str(text) => Some(text.value()),
                _ => None,
            },
            _ => None,
        },
        _ => None,
    };
    attributes.iter().filter_map(text).join("\n")
}

fn has_section(docs: &str) -> bool {
    docs.lines().any(|line| line.trim() == TITLE)
}

/// Returns true if documentation says whether a function is collective.
fn says(docs: &str) -> bool {
    let words: Vec<&str> = docs.split_whitespace().collect();
    let mut pairs = words.windows(2);
    has_section(docs)
        || words
            .iter()
            .any(|word| ["Local.", "Local,", "Local:", "Local;"].contains(word))
        || pairs.any(|pair| {
            ["Local", "Collective"].contains(&pair[0]) && CONTINUATIONS.contains(&pair[1])
        })
}
