#pragma once

#include <xgrammar/compiler.h>

#include "grammar/compiled_grammar.h"

namespace openspec {

struct CompiledGrammar::Library {
  xgrammar::CompiledGrammar grammar;
};

}  // namespace openspec
