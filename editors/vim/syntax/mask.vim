" Attention masks (docs/language.md)
if exists("b:current_syntax")
  finish
endif

syntax keyword maskDeclaration use const input let mask check assume
syntax keyword maskWord        from where within per
syntax keyword maskConditional if then else
syntax keyword maskOperator    and or not in
syntax keyword maskBoolean     true false
syntax keyword maskType        segments spans int bool sorted block row key head
syntax keyword maskCheck       causal isolated by no_empty_row
syntax keyword maskFunction    same first last abs min max
syntax keyword maskCoordinate  q k h nq nk

syntax match maskAttribute "\.\@1<=\(start\|end\|len\|pos\)\>"
syntax match maskNumber    "\<\d\+\>"
syntax match maskSign      "<=\|>=\|==\|!=\|<\|>\|//\|[-+*%=]"
syntax match maskString    "\"[^\"]*\""
syntax match maskComment   "#.*$" contains=@Spell

highlight default link maskDeclaration Statement
highlight default link maskWord        Keyword
highlight default link maskConditional Conditional
highlight default link maskOperator    Operator
highlight default link maskBoolean     Boolean
highlight default link maskType        Type
highlight default link maskCheck       PreProc
highlight default link maskFunction    Function
highlight default link maskCoordinate  Special
highlight default link maskAttribute   Identifier
highlight default link maskNumber      Number
highlight default link maskSign        Operator
highlight default link maskString      String
highlight default link maskComment     Comment

let b:current_syntax = "mask"
