#pragma once
#include "../base/base.h"

/* ===========================================================================================================
   UNICODE                                                                              src/text/code_points.h
   Properties of code points that tokenizers use. Each table is a string that encodes numbers, most of which
   are differences from the previous row. tests/golden/make_unicode.py prints and explains the tables. This
   file uses src/base/.
   ======================================================================================================== */

/* These tables were printed by tests/golden/make_unicode.py from version 0.23.3 of the Python package
   tokenizers. */
enum {
    TT__LETTER_ROWS = 1544, TT__BERT_ROWS = 291, TT__CJK_POINTS = 1056, TT__MARK_ROWS = 334,
    TT__PAIR_ROWS = 1058, TT__COMPOSED_PAIRS = 940
};
static const char tt__bert_text[] =
    "#E%($a,aGb,0$iZg=dG5d<b_$%$)$)$%]8-N$$Ra93%aM=#$$9%)$1E$$%BaRaCN_FF1$F$-$5O-b2b)[%$%'B'%&=-)A%_%'1+%7)A"
    ")^%')')%-&%B)&%.)^%'5$)'%7)A%_%%%$1+%+%.)B%a$%/%V%a$-(-$1*).)A%_%%%)%()7)A%a&1+%7)aN%*-$%aB%%=/BaJ%%9$)"
    ".9a1)>%$%$%[Z$5$)(N$b9,%aN1$9$)%)<)'-310%%))%2%kO-oR-A-A)B)a')$=+%%N,%Q-#$bF%a_-'),%)-cK)%%_%$=$%$%%B)J"
    "%%TZa)1T%$5$%(%LF/)D1%)$-]%$)&%$-_B%)bD-$V$='%)%&)c5cF)1hO4=4U4$IaHV'%&Rau--b8%aHb)i11aS)pvP%'JD)a7)dD%"
    "&%'%<)bI%>a-XB<NR-T%%1%%L%a*9%)%)/%+%S%W%$-%)()$%N)+%c_%%%'%gl-nfIi%%l4a%3a%c>$d,,$$hC%cR%bA5{V-$)(1L-'"
    "%bQ)uR%Z_]-U1%)%$a)-H5$Ba%%/)XF.-aJ-%%$)bS%&B8)_%&%I=&5e59$%')$)c_1))$)>)a<B%%$)aR%$%%9$%aM-%1$5k{;5`=r"
    "D1j|N)$0b|G-,A#B%=B1b@-ab`cJ'c5+%1%95$_a~3=ntf%$Bf8b+o_afd#dyrY%dyrY";
static const char tt__cjk_text[] =
    "ai{'jrCki]q*hoMih8arJup)#s}Upb+qd>ab%bn'exBbqPa{;lJjHbdRj|^z=aa]yRdsNcv=blRumMal1fu%a~Beu3fx5rl`ehRffP~"
    "Jj}<hy%awFkvMbjVaw_aqDhn@rq&rNiVebPauNbaRak5bqLau9bXbdJbs%af-uNjs:h)ae1avFdi_cg_eqQnf8av=hjDae+c~:axLet"
    ";b{)qt(~/czVab1j5c~DhTfy@seQl~-mh8Ckn#aa#avZeh#ccAkq0ba=ik@qhEczPaeFep%p5iw(jw7kuWdoTd~2hv9bbCfu]kw$ai5"
    "hu=cw7ax=hw`jfXi}`bu:ib1hzUeaJj~8w5c/fmXex'aq/bkFa}Jqz6k)an5apNa|=b{1br3hc5aj=aeJaVut0ev)aj%jfBm{CzDcPv"
    "/b}Zr7{PanVaeDu-deFb{.ceJzZrp8dLq]g}5fxHp3ln<j#~'bi_du7bn^jl$bh_al'oFt7eq+f)ceBePec#ajHbPf]ts(k}Ffy#alT"
    "oi<efIsXcdDbNbsTagJbfDah#deLch+dhFpfEmpHsg0e|Pd#ao3kFap5k/z/aiJgw#te8dv_nz/s}Yct7dwBimPmp8nNa|1cgHi|Jsm"
    "8p/bk+bvHjBkDaf-a~VoXbuVbsLHbp)am;sg,gxBgq(hm=wPd|7dv-arLs@osGav]euJa~MbVl7bwSr8gr1qg&n{Lm{`aMcqNaeJgk_"
    "in4d~-axOkoVa},c}BcrWldCcyUah;apv'%ao}Yao}_ak}Iak}N%aqy:in+~]tXa+1a;hn)gp[yFadx7ab~4ab~9aarEaarJ%~cWfF}"
    "{;%%{sK=a@ahTcsCasZtf,j=c;lLZcJsHcBc3oPc@aaX7ae;g'a3c7|NdZeVpLal/e=hTsHf5pRagVeR9$3/1aH%e]b-jJrTNaXj-dZ"
    "p3dL#o]aj5d@l)aXmLaRvXd7azZi@b#oy[dqg)dgt&adfX%ar~,~9bEp2o)a_jZaNvBb:b3b=u'b_dVDi#fHaa31dTb3i_c]b6d@aCd"
    "Xb/m7b]aThLiDe=+a_ae5b-m%mLCbZh;k/aw)ap>d'd)jZd_aRgD'eNFVbX6m/p-i%f1g@e)k#fJ|-e1~/o/b5DiZaZaAaT(EbDbNlP"
    "rLj@iVg9ad7c=cVd=a/;aHx1ahPcutX.chNdwlKah1a)d~w/b}Vit1dpl2bBy}'%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%asd"
    ".,5dct_dck:bH=b9d#a%bHSg~Edlm/ddh<1DJdc{BdlbQhdPa3dc|7dc{`=x2xD5emzHemx>@hhKhjD9a@-hjOhm;'ZP9%FaL35V7'#"
    "#ddw9czp:hd>Ndd~Ddd~*/Ne'c:Da'a]bTXb1Da)#NH3Bk7i&i)fGa-agQa|ZiGa3Vd6eF$d)dfjLdfh6-BL3b+dfsLb/dfq2aF;bId"
    "PjbK@jgHaT#df~@dfz$NB;dgeJdge01|-{0jlEjnJ@bPaMdgx9dgr4dgr9dgp[(Fc9%juMjvHa=Na@jxAdscZdsc$jz#))Leof#eod2"
    "dhrR#c|s`i{E#j{4dw{9ml/dzj*5j|Sj~9aN7a+dDke,`kfTdif3didEd5+'&aDLa/>9aFL+X9b/bTa-d+dir]disEb,cHZc1diuJdi"
    "sEc([kw^k~9Na%a2k|Qle__djmDdjiEi1eUlhClj]lkAa.fmD)fbRc6gl=qi&i~P+/b%8dj}'dwnWlu9cYfVaNdjxDdjx0cMh-l{^l}"
    "Bc1b9f7djy-djw>mi$mk9dkh7dkfImk2ml3aBZ%dks;hkSho=dkr*dlc+dk}8@c:eVa7aZaSa7B=dkz%dk|Oh9b)m~(nc/*dk}TdlfK"
    "l=dk|]aHdk{GcVY(nk(nlLaN.aTcya@cxz:dli#dlf(dlq%dll8=Zdma/dl}GNdmh]g=dmhOFoa,ob%oaI#og%NNLb5oh(ok)dm}Tdm"
    "|[dnb#dm~6dawVdarAdnu)RdLd~g`;orLdnxR$a5XdnyA%#a=osYov'ouIbLeaeNdoj0b'b+o{(eatBdorSdovLa=dov.c'pd*pf_7-"
    "dph_i_#dpmIpeOeb|%dpo()pkSeccZdpm2ppGpq7,_dqgDdqd0pr.puDa_b1px$edm/a%edl`edqXdqnQdqr+dqq0c99dq{1b=dqzId"
    "ra'dq~Cdcu=dt|Gqi9bNqj2ql1j|Ud}iD@nxW5dcj()cz'ukMqt7.HmrWmsD'7a9dr{+dr{,aXb7b@dGe+a;cPhKc_'Ddr{3j5d`ef{"
    "Crd/'a-dtu@dtrWdsi@egoU+egt+iJeg}<rmR;9'b+a(d@a>e%bMb1ZrtArwDa'rw>rzJ)dtoHdtkO1r|Ur}Rw|Yen|Zf+eja65sh_b"
    "Fe1fRdue5dub<Pc#c'duq/aczYcqqAAaPcqwDcqo[c7dv|XZdvr,c)a'dvxNdvx8iBe5%c&lN]dwiZdv{<ur.usLdwhLenyIuyZpf^p"
    "j-dw}#g)eo~K3u~Hdxp7epn[epsHdxsE#a#dx|-dxu`vbYve3d/Zb#vg.erf@dyt&j'f5vx0a%vzPdzr)esn>esp5hVd9dzuSwdEwfJ"
    "-171a1d{pVw{T%";
static const char *const tt__letter_text[] = {
    ",q+5'#a}X#ai1#yP#cp^#l]#;#+#cp^#l])'='#+(+%4#+)dV$4#d;$F#4#+#i)#+#cd,$dh4$bd~,'aq01q8*4$44kf3#b;#doP#m("
    "#a8$dE%m(#a/#4)4#a/#hU$4$bu8$kt,$ss($tD#fL#wn4$eh,%4#u@#et^#d;)fk/#+#c@#+#gP#+#gP#+#c@+cu0'm(#d;7d;$d;%"
    "ap+#+%d;#e}A#b|T#ai1#l]#dE#c@#m|<#+#4#}'%xT#dE#gP$p3#dE#ai1#hU%4#ayH%4#c@#dd$#cx;%loQ#ao'#41ai1#dpU#agH"
    "#dE$hL#4%3%b}Y#p3#4#agH#4#l##4#tD%a}X$clM#l#%+$al^(ch<$uI+ad;#ey0#ahL#a|]$db]#o/#gp<#fL#c@#4#bb+#c@#fL#"
    "4#p3#j]#aa0#dE#fL#d;#ai1#+#bd4#j]$~,%dE%b}Y$yY$4&m(%c@#4#c@#wP%fL%fL#c@#4+c@'eI$a8#dE#fL%ai1#dE%uZ%4$3%"
    "j]$uI'dE%b}Y$yY$4#a8$4#a8$dE%c@$s@'fL%fL#c@&b;*iY#4$a8*ai1#fL#hU#b;.j]$ad<$hU$b}Y$yY$dE$q8%c@#4#ab3$j]$"
    "fL#c@%42dE#fL%ai1#++4#uH$j]$~,%dE%b}Y$yY$dE$q8%c@#4#c@#wP%fL%fL#c@*3#gP'eI$hU#fL%ai1$4#uZ-b;#4$uI&hU$m("
    "&dE$4$dE&dE&hU&aq0'c@#o/&j]$j]#c@%4)c@1ai1#i)0o/#3#~,$hU$cd,$bd4%3#4#|#$j]$j]#c@*gP$hU%4%dE#fL%ai1+z-$4"
    "#j]$~,$hU$cd,$ahM$q8%c@#4#o/#c@#fL$j]$j]#c@*gP)dE$dE#fL%ai1$dE#3/3#j]#ad<$hU$et^#dD#4#c@#wP$j]$j]#c@#4("
    "hU#c@#z-#hU#fL%ai1#adN$uI$3#fL$blU&ch<$ad<$4%yY&c@'c@#s@$b;$|##c@)ai1%fL#+/ftU#b;#dE#o/#l#(yY#b;#p3#j]#"
    "+#ai1#d;IdE$4$q8$ch<$4$ahM#b;#dE#o/#gP#3#fL#4%q8$4$p3#fL#3$ai1%m(D4&a}X$+&gP)ai1#ah_$c@$c@$c@#l]#fL#hU#"
    "a8#m($m(#a8#m(#a8#m(#a8#m(#a8#aq0#a8#hU'xT#b;#c@#b;#p3#fL#tD#+#gP#q8#wP#c@#o/$o/#c@#o/#c@#o/#c@#o/#c@#a"
    "s7#c@#j],c@,q/'d;Ie}A#j]#c@#ab3#c@#b;#gP#o/#4#ai1#u@#uI#o/#m(#j]#4#j]#dE#|##hU#o/#auA#ao'#c@#4#b;#ai1#o"
    "/%eh,$4(4%e}A#+#nf^#bzM#f}8#cv4#r{Q$m(%yY$4$m(%et^$m(%dpU$m(%yY$4$m(%a~$$g}0$m(%ikY%l##ad3#buJ&bd43lb^%"
    "uI%+#b|a8#d;#bhE#'#cp^#d;&jp$#hL#i9#~,*blU#fL#c@#3,bq(#fL#c@#d;,blU#fL/auA$hU$fL/ggY#df+#c@#b;#hL#4#hL$"
    "4#c@%ai1)ah_)alT#j]$3#ai1)loQ*q8#fL#du(#c@#4(ixM-dh4$as7'afD#l#+d;#ai1#dd$%q8.fcQ'cp^)ai1#FIcd,#gP#j]%d"
    ";#gl,#ajT$c@#bw@#ac7%c@#ai1)ai1)yP#4#u@%a|]#b;#bd3Us@#fpE#gP#a{X#c@#~,&ai1#yP-agH/j]#dd$#afD#gP#fL#dE#a"
    "i1#fcQ#c@#ao'#gP+l]#d}I#bs/#c@&q/#ai1&hU#ai1#d}I#d;#al^(e}A%hU#~#+l##+#axL#b;#}'#m(#c@#m(#fM#c@#dE#3#gP"
    "#4({e0#gsH#q7#tD#ail,%uI%eh,%uI%~,$4$4$4$blU#a8#4#a8#4#a8#4#a8#4#a8#4#a8#4#a8%gl,$q8#a8#4$a8&hU$hU#a8#4"
    "#a8#4&hU#a8%q8#a8'hU#a8#yY#a8#4$e7%hU$hU#a8#4#a8#4#a'%e;#ad/$dD%ch3#d7('#a}X#dL#hL$au7$+#;#ahD#'3F#4%uZ"
    "&d;#4#ah_&d;$auAWaxL#o/#c@#j]#at;44'4%ahM$4&q8)4$a8$4$eI#dE$al^%m((q8'4$bdF#dyZ#dE#mJ#Ff9l]Ae@e,hl5=ggX"
    "#b~-j3ayH#dd5Ud;CahDfOb}Pa&l]Dd;cNa'dWabm()m(#l##dE(l]#F#d;#eh,$4(4%gx^*4#+1c@#cd,,yY$yY$yY$yY$yY$yY$yY"
    "$yY$doP#fp;#4#bp]g<'#hL$dE#V#ahD%aq'$ad_#xT#+#q8%i9#dE#+&lb^%gP%hU#+#lt$#+#m((e}A$mg(&m9-dlETbd4Dah_B~="
    "$a~5Dah_Ka~5e7aagkYa'coabEa*fl4#d;#ahcQ#hL#bd4#ai1#dE7fpE#c@#j]#+#akX#+#dh4#gP#ixM#ai1#gP#u@Cad<%noA%ik"
    "Y%dE$4$~,8bd4#b;#hU#c@#m(#b;#cd,#s@'3&uZ-ggY#l]+fL#f}8#bf;#c@#b;+d;#ai1)bp##uI#hL#4#+#dE#3#ai1#cyA#s@#l"
    "##d;#cd,#as7#c@.+#c}Q&o/#fpE#c@#as7#c@#au7$4#ai1'd;#q8#b;#ahM#ai1#q8$et^#a{X,hU#b;#~,#fL%ai1%l]#cd,&4#j"
    "]#f}8#c@#4#l##dE#gP#q8#gP#4#c@#4;hU#d;#al^#s@#d;#hU#b;#c@-uI%uI%uI,yY$yY$e}A$ayQ)pfM#ab3#+#b;#c@%ai1)av"
    "|w0/cd,'fy(dtXahi(#dE#a8#4#a8#dE#aiQ#4#a8#4#a8#dE#eI#hU#iq0%n}8JyY/q8(a8#c@#a8#ad<$avE$r<$a8$eI$eI$aeA#"
    "m|<EaunU#d;3h}(%gp<Laq0'bf;#ahD)bg@#hL#dL#ch3#h]#hL$ayH$+'+$d;'q8$sb$'hL$u@$l]#ai1#d;&d;#cp^#hL$;$cp^#+"
    "$+$yP#loQ&uI%uI%uI%hUGaq0$cp^$bq($dE$a~$%ayQFqjU(hL'fh5/glN#m94dVaYc@b-c}Q&fy(2c@#cuB'dlE#m9,bu8#V#~,#V"
    "(eh,#tD(dd$$+#d}I'~,#+#qZNvj,%ai1)d}I'd}I'epM+ggY.+#al^$a~$$yY$dE$al^$a~$$yY$dE&ggY/anb^,b}Y-~,;uI$ey0$"
    "ad<a,uI%4$fcQ$dE&4%cd,$+#~=#cd,%z-#dh4+adNTbq($dE(qJ#b}Y#uZ&+#cp^(+a'gx^'dV#dE#bdF%flF#4#j]$fL(b;#c@#b;"
    "#c@#m($hU$c}Q%l#'c@#adN*ad3*c}Q#dV#+#c}Q#i)D~,$cyA#gP'qJ#yP,gp<&yP#b}Y%~=#bq((~=#blU*l]/z-a7jgA[gcI0gcI"
    "*uZ#d}I#m'+ai1)ai1#cyA&q7$cd,cJdhF$ey0$dD&dE3hU[m'#c}Q#ah_#4+b}Y#al]#m9>blU#m'NbyI#z-7cd,,j]#gl,#a{X#c@"
    "#yP'buJ#ai1#3#dE#dD#4,c@#j]#fh$#afD#gP#d;$l]#30clM*ai1)l##d}I#c@#ao'#gP$ai1#l]#4#dD#4+dy8#c@#d;#4,j]#ft"
    "U#awH#c@#m(#l]#;#c@#fL#+#dD#ai1#4#+#4#hL$buJ.blU$clM#afD#gP#b;#u@#b;#dE#3a%yY$4$m($a~$$ahM#+)fpE#ajT#gP"
    "(ai1)o/$~,%dE%b}Y$yY$dE$q8$3#c@#4#c@#wP%fL%fL#c@%4)c@(q8#fL%}'&tD.ahM$4%4$eh,$4#ad;$3%3$m'$q7#4#3#40dDA"
    "gl,#awH#c@#j]#c@#m((ai1'3#hUBftU#c@#afD#c@#fL#c@#o/#gP#dE#+#4+ai1bRfpE#c@#wP%|##gP#cd##m(#fLFftU#bb+#c@"
    "#b;#hL#4.ai1Je}A#ao'#gP#4*ai1)buZ@cu0%a{X#c@'ai1#dV#hL$yYc(fcQ#a~#aMh}(#ai1#adN/~,%4%~,$dE$ch<#uH$dD%m'"
    "#4#3#4#dD/ai1a-~,%el<#yX%yX#4$4#3>4#ahL#epM#yX#4#m'+3+4#al]#fl4#bd3&45jgAc6dpU",
    "2ai1)ad<$ecY#ab3$|##c@#42ai1#bq9(dd$%cb#$a{Xa0yY$dE$eh,#uH&3$dD$yX#4#3+ai1)uI$dE$dlE#q7$dD$q7#4*ai1Zah]"
    "d)bq(#m',dD#4#3#auA$du(#yX&q70ai1#3a<42byZOdj}YaNot-$q/.{v4am]msY2ebiY33#uI#a~#-r|a8(bvwAcx$dd$#blT#ai1"
    "|ZbtwQ*dh4$ai1'd;#kc($ai1)dd$%tD#+-ftU#}'#q/'m(#+.ai1$z-$byI(bq(g/fh$&ai1c5h}(#cd=aQjp$'3#4#fn;#ad;*o/#"
    "auAa'dE$4#3.dD%i',}bp4+ey|,MahMd|[m($yY$dE$akgI24AhU%41m(+azeIah@obE(auA&ad<*ahM&b;#c@#+biHai1hJfl3%cd+"
    "h[zL#tD&xT+ac7%}'Bp30v;b,l#b&buJ/buJaTcl_b2k|M$i|^$dE%4%dE%m($aq0$4$yY$ic8$m(%~,$yY$cyA$m($q8$4&yY$arfM"
    "%clM$clM$dh4$clM$dh4$clM$dh4$clM$dh4$clM$~,%f}ZhDgvT'ga@+b;1b;%q/2s@$bb+r;dh4)uIcE}'$bkP%}'$gP$tD(htEE3"
    "aXfh$&yX#yY%ai1'4e8dd$#34fcQ#m'#ai1gVcyA#m'#ai1cFdd$#dD#4#ai1h(yY$m($dE$a~$${zE%adN#}'Mip,#}'#4'ai1m.hh"
    "%$i)$m9a3fh5$a~5c1m($cu0$dE$4%4$ahM$m($4$4)4'4$4$4$hU$dE$4%4$4$4$4$4$dE$4%m($yY$m($m($4$ahM$bhE(hU$q8$b"
    "hEiLauRGcp])cp])cp]an9ai1q-fvor$DstsQ)aam0%{ijE1aeltU2b|iYak)bp}Iy)wli((szaYmep]adb+"};
static const char tt__mark_text[] =
    "lTv-#W#c^#W#O#e$#aQ#c^#aQ#k<#d4#c^#b_%V%Z#V#bY#b_#aU$b_#c^#V#W#aU#V#X#a^#X#a^#X#mJdGe)d<Q#d%#Q#b_#R#Q#f"
    "-#f(#aZ#Q#aZ#R#U#V#(#)#*#+#,#-#.#/#0#a5#2#3#4$5$6#7$V#Q$0a/h5#<#=#>T9#:#;#<#=#>#@#A#aZ#aU#e)#Q#aZ#Q3BaM"
    "g1%d%#Q#V%aZ$Q#aZ#QGCBV#Q#aZ#Q#aZ#bY#V#aU#V#Q#b_#Q#V#Q#V#Q#V#Q#aZbLg1#Q#VFd%$i9$b_$e)ObYb#nN$Q#aZ#Q#aZ#"
    "Q#b_#bY#9#:#;#b_#Q#aZ#aU#e)a#%3'&V#Q#aZaO%3'aV%3'aV%3'aV%3'b*'b*'*D#EaM%3'b*'b''aUaJ#'0cSaTaL1cUa3aU>Q$"
    "Q$O[J#K$L(cW%K$aZ#'$aZa%QaX%$a+a9Qk`b_oT'C'bI'-Vc:Ub:R#V#QcKV#Qa.'7h5%QTe)#f(#aZ#Qa_%2'JV#Q#g1Za+_%.a+a"
    "*%bDb_$$#e$#aZ#c^#V$f<'Q)V&aZc5aZ#Q#g1#Q#aZ#Y#N#Q#M#ai1(V#X#Q#V#Ql#aZ#a(#d%#b,#aZ'V&a(#V#Q#V#a(#c^#Vau-"
    "b_b8'aHacZi1P#U#W#R#aWaQa*pvPV'j=DaZa7aZdH'c,'>r_^bYI'aG%/'c`V$aZ#Q%aZ(aZ$VX'd)'kgX8lUg1#g,#aZp0QcRQbAe"
    ")|%Q$VLV#$#Q''bQV#Qv[']'^'#%a,b_Ta+a%%a3',%aR'#%b_%#'a8%3';g1&e)c<'&%b&'#%d.'#%b)'a_'#%a['uK'kePd4`g1kq"
    "6$b|JaS#b,&T#d`+h0%e)#aUBd%b@b_a|Gg1$qZ%g1$aZ$e)afYg,aUf-#%";
static const char tt__pair_text[] =
    "f<b-yH&#%&#%&#%&#-&#'('_&'a4&#%&#%&#/&+2&#%&#%&#/(-,&%(&#%&#%&#%&#-*/2&#%&#%&#/&+0*3$&#%&#%&#%&#-&#'('_"
    "&'a4&#%&#%&#/&+2&#%&#%&#/(-,&%(&#%&#%&#%&#-*/2&#%&#%&#/&+0(#1&aW*&a'#&a&'&a'#&a&a+&a'#&`a4&a'#&a&%&a'#&"
    "a&-&a'#&a&-&a'#&a$#&a'#*a$2&a'#&a&'&a'#&a&%&a'#&a&a)&a'#&a&[&a'#&`6&a'#&a&+&a'#&a&%&a'#&a&a'&a'#&a$a0&a"
    "'#*a$%&a'#&a&%&a'#&a&'&a'#&a&a+&a'#&a&a(,%,&a'#&a$a1&a'#(a$a2&a'#&a&a3&a'#&a&Y&a'#.`8&a'#&a&a3&a'#&a&Y&"
    "a'#,a$2&a'#&a&'&a'#&a&-&a'#*^6&a'#&a&a3&a'#&a&Y&a'#&a$8&a'#&a&%&a'#&a&a1&a'#&a&Y&a'#&a$Z&a'#&a&Y&a'#*a$"
    "4&a'#&a&%&a'#&a&'&a'#&a&+&a'#&a&%&a'#&a&_&a'#&`a2&a'#&`#&a'#&a&/&%0&a'#&a&/&a'#&a&-&a'#a,a<B&a'#AW#&a'#"
    "`aOA&a'#&S#&a'#&W#&a'#&W#&a'#&c=2&a'#&a&(&a'#&a&9&a'#&a&:&a'#(aW+&a'#&jP#&%#&kQ#&a'#*e43&a'#&[#&a'#&[]&"
    "a'#&lJa.&%#&aO3&g5#&r:#,a,8&a'#*U$&a'#&bZ%&a'#&a$#&a'#&>#&a'#&f(@&a'#&a&'&a'#&[&&a'#&a&'&a'#&[&&a'#&a&'"
    "&a'#&W&&a'#&a&'&a'#&^&&a'#&a&'&a'#&^&&a'#&a&'&a'#&a*N&a'#&a$#&a'#*a>W&a'#2a4,&a'#&[a'&a'#&cRa,&a'#&a(#&"
    "a'#&eC)&a'#&nZ(&%#&oK#&a'#h_uFyO%%#'H#%8yJaHbIyI7u2#2cJyJ&xV#%x6yI&x@yJ&'#&'#(/#(/#&+#&a)#YaI1&;#&;0&+#"
    "&'#&'#&H#YG1&;#&.0&/#&+#.5#&#1aAb12&#3(&0,<1.L0&&$&9/:8#a(a'#S(.&#3(&0,a-1.[0&&$&9/UaJ5&%#bAc,4&a'#Aa2#"
    "&a'#&a&'&a'#*Y&&a'#*e='&%#&fA#&a'#&a$#&a'#*a$*&a'#&a&+&a'#&W#&a'#*eL#&%#&f2#&a'#&a:*&a'#&a&+&a'#&a&)&a'"
    "#&[(&a'#*[#&a'#i[oX|)&#%&a)#&a(%&a-$e,dJ#(K#GF#s^s]xT43#*)#a/`#%%#%%#%-#%-#%%#%5#%+#cIe'd7&#VDa2Y%%#'=#"
    "bTd9d3)/#a-a*#%%#%-#)B#gUi@i;*#S&#VDa2Y%%#aWcPe-aUaPU&%#&$Vd,d3d1d$d%d121#&#%(#K&+Jd2d+cB&%#&$VdQdZcV(#"
    "-&),&(NkZl%oP77#--#--#--#=Y&7aJb0'#'%b-;'%#5b.#Ha)aV77#--#--#--#=Y&cKd_d%cbUcbTcd)('#('#('#('#,+#a:a9#("
    "'#*'#&%#()#w:gt<fy6&a'#&a$`&a'#&a&]&a'#&a&@&a'#&c9aG&a'#&e</&a'#&a&]&a'#&a&@&a'#&a&6&a'#&a&/&a'#&eTaA&%"
    "#&$%&%#&fWa@&a'#&a&)&a'#&o%a:&%#&p(%&a'#&a$(&a'#&a$)&a'#&a&]&a'#&a&Y&a'#&a&a%&a'#&a&1&a'#&a$'&a'#&c;aE&"
    "a'#&e>#&a'#&a&a+&a'#&a&@&a'#&a$>&a'#&hn/a$&%#&ho4aB&a'#&a&*&a'#&a$a>&a'#&a&/&a'#&a&]&a'#&a$[&a'#&a&]&a'"
    "#&a&@&a'#&a&*&a'#&c=a>&a'#&a&1&a'#&bZ2&%#&$%&%#&h<#&a'#&a&/&a'#&`#&a'#&a&]&a'#&ho/a$&%#&hp4aB&a'#&a$a:&"
    "a'#&a&]&a'#&gN[&%#&-#&%#&hgB#&%#&hpA#&a'#&a&]&a'#&a&@&a'#&a&*&a'#&a$4&a'#&a&;&a'#&a&(&a'#&h)a>&%#&%1&%#"
    "&i0,&a'#&a&a'&a'#&a$a,&a'#&a&%&a'#&a&1&a'#&a&$&a'#&a&]&a'#&a$[&a'#&a&%&a'#&a$$&a'#&a$,&a'#&a&a)&a'#&a&@"
    "&a'#&G#&;a8&)'&'#(hP(.jG]&a'#&a&W&a'#&c12&a'#&a&$&a'#&a&5&a'#&a&.&a'#&hmT$&%#&hlQ$&%#&$$&%#&$5&%#&$.&%#"
    "&hlN)&%#&hs&_&a'#&a&W&a'#&a&.&a'#&c9&&a'#&a&$&a'#&a&5&a'#&a&.&a'#&hn7$&%#&hsO1&a'#&a&X&a'#&W#&a'#&a&W&a"
    "'#&c92&a'#&a&$&a'#&a&5&a'#&a&.&a'#&hnL$&%#&hh^$&%#&$$&%#&$5&%#&$.&%#&$a'&%#&k&#&a'#&a&W&a'#&j@2&%#&$$&%"
    "#&$5&%#&$.&%#&$a'&%#&k<a,&a'#&a&a-&a'#&a&W&a'#&a&.&a'#2{@D&#%&gw%K&%#&$%&%#&$b-&%#&gx*aE&#%&gx9K&%#&$%&"
    "%#&$b-&%#&gw.aE&#%&gw=K&%#&$%&%#*gxCH&#%&gxRK&%#&$%&%#*gwKH&#%&gwZK&%#&$%&%#&$b-&%#&gx`aE&#%&gy1K&%#&$%"
    "&%#&$b-&%#&gx*aE&#%&gx9K&%#&$%&%#&$b-&%#&gy>aE&#%&gyNK&%#&$%&%#&$b-&%#&gx>aE&#%&gxNK&%#&$%&%#*gySH&#%&g"
    "z%K&%#&$%&%#*gxSH&#%&gy%K&%#&$%&%#&$b-&%#(gz*aC(gz;K(#%(#b-&gy.aE&#%&gy=K&%#&$%&%#&$b-&%#&gzCaE&#%&gzRK"
    "&%#&$%&%#&$b-&%#&gzCb.%#%&+$%#%&'$%#%&'$%#%&/$%#%&/$%#%&+$%#%*gv1b3&%#&%#&%#&%#&%#&%#&%#&%#&%#&%#&%#&%#"
    "&%#&%#&%#&F#&%#&%#&%#&%#&%#&%#&%#&%#&%#&%#&%#&%#&%#&%#&%#&aJ#&%#&%#&%#&%#&%#&%#&%#&%#&%#&%#&%#&%#&%#&%#"
    "&%#&gzOb(&#&&gzRb-&gzQ#&,#(-(&g}))&g~,b(&#&&#*%#%&#b3'a7{Y*z,{T&hvT)&gzM#&4#(5(&g}=)&g~Eb4%#%&'$%#%&#b3"
    "&g~3b4&#%&#b-&g}*a`&#&&F*%#%*Eb-&F#&aIa`&#&&#*%#%(hb5$&#%&#b-&g~Ua`&#&&/*%#%&6H&#%&+aD&/#&a2a`&#&&#*%#%"
    "&*J&y8K%#%%b:yI*hy@{Z&gz8#&-#(,(&g~=)&haUb4%#%&7$%#%&#b3%y0{Y)h{+#%%#iRha[#+|O#%6y]cOin1aD&'#K'#a&b##&+"
    "#&&#aSaJ#.-#*)#UT#('#[R#*1#*'#()#SitA#(iu7#:K#&itM#&'#&iu;#&%#*=#&%#*)#&%#2)#&%#*1#&%#*)#&%#a.Z#&/#&%#&"
    "'#aKaE#&%#&L#&%#2a'#&%#&%#&%#b#cwN{>%%#beLan*{@ap<ap7l{1('#('#('#('#('#('#('#('#('#('#('#*)#('#('#21#&#"
    "%()$&#%()$&#%()$&#%()$&#%SaQ$8bZ#A@#('#('#('#('#('#('#('#('#('#('#('#*)#('#('#21#&#%()$&#%()$&#%()$&#%("
    ")$&#%SaQ$*b=#&%#&%#&%#,9#a{nRlh*lf$'V)947%#%%biwX$%#%%bixM8%#%%#+%%#%%#%%#%%#%%#%%#''#%%#%%#%%#%%#''#''"
    "#%%#''#%%#''#%%#%%#%%#%%#%M(%*/%7#%5#faQboyZbo|1('#C7#d:dLcJ&%#r$qRqV&#Vl2l7kV&#6(#=h<hBh'&%#awk-awk#aw"
    "kT%%#%15%#%%#%%#%%#%bZc#<%%#%%5%%#%$%%%#";
enum { TT__GRAPHEME_ROWS = 820 };
static const char tt__grapheme_text[] =
    "#h4aGhE,+&$#+iY}JdGaJd:kR$%$5$5$%]a>-bN$$Re93%aMaJ#*$a9%5$VE*$%Bf_aCbN_b-,%;V$b-$F$a)OFX:(b-Nf-#*#h5#)4"
    "iQ#%#)#%$J#aZ#Z#'#9$aJ#b$%57b$$%#94e0$aQ$,&^%%$%#9#V%9%9#',%'<$,%5/</%%5#)]%$J#5'5%F&%B5&%.5#)4e0$aQ$<$"
    "a0%%$J#a)$5#)$9#'758,#a9$%#94e0$aQ$<$a0%%$5#)#V%9%9#'*F'<$,%50,3%`%#)#%#9&J$J#%,%L%#J#%3e0$d,%%$F#Z$F$F"
    "#'*5$M*5A%#9]%$)#5#)#%#9$F$V*5.52)/5#94j$#5$%#9#V$J$J#'#*+%-5A%#9a-%'%#9#F$%$aN#%59a$%$)#aJ/aZaJ%$)#b-."
    "aJa05>%$%$%'9UcB#)#a)$5(bN$i9,%^k8%V#)#a9$'#%#9#5#,3aA#9#5#^#F#,&<*M#V#c8#%$)#5)%#,1%kOFoRV@FA5B5/mQ#5#"
    ")#aJ#a_#%#9#b-#'#%,%QF#$#%a^5F%a_F#Z#5#J'9#%#a=#FcK5#9#%'n$#)#%#)#aJ$'$%%aZ#a=#b=%%Tl%%b_7V#))<)hM#b=#Z"
    "#5#'#b$Bb-/5#)#gY#)#V#9#F#'#5#<.ML%#)#5#J#%#)#a)Ta_#aZ#9#5bDF$c1#)#aJ'%)%%)#5c5pVhO$#&#(#4;aI0+/+9d$aHh"
    "FU+9+aBa@2;f*;/+bR+<bT'Lc6+cW;-+,+_]$a/,+%+%;%+'+%+$;%+&+&;+L(+$+(c'.;%+$;$+5+%;5a@$+$;&;(+%;';.;(;%+(;"
    "$+$;7;(a@$]%+'+%+%a@$+%+$+$+)+&+)+-;2+%+'+$+'L$+.;TL,+1+1+f/;gOL6;W+'+fUFb8%aHh5i1a9#+/+aC5h@+$+pn0V$b="
    "D5a75dD%&%'%:9#5#)'%a:9Vd)#5=dF0%JaZ<bN#)#%PF#)(M&iA#%#9#V#9#5#9#'Ca0#%$b4-a0Na9#9#5#9#5/%+%#)5d,$M),$%"
    "$<T%$F%5(5$%BbU#)#5#9()#'c8g(+9#%#9#%#9$)#%kgX%l4d%3d%c>$bJ5a7b^hE%cR%bAa){U,#F$5(V#^$M$gI%F''bQ5iEVa(a"
    ")e45a4a9a-bNUVb%)#%#)YcRM%%5-F#)QJ#V#9#5%*'%-*VF#iA#a)#)#a9#'#%2,#9#,O%/5#)TJ#b-#)#%$:(V$)#%aDJ#F#9#V)%"
    "%%bI%#J#aZ85#9[5$%#)#%#Z%9%9#%,%-9%aJ&a).bE$,%,$j$%%#9#a9$%%%$F#)$9#5#'#*#%15a9J#aZ#9#F#)#%:%a8%#9#a9#)"
    "#%#9#%#)#5#)#5c[%#9#V%Z#5#)#5>5a9J#aZ#9#%#)#5aR%#)#%#9#aZaM%#)#%%V#)#a)d3J#b-#)#5c4aQ%,%b$$<$f4#%#a-$9%"
    "F#'#*#)#*#)#%b8J#V%5#Z#%&)>,#b=#jE#a9#)$V+'+,#a9#9#F#jE#a>#c1#)#%#'c5%#)#F#)#%#)c6)#aJ$a9#)#%a9eJ$)#aJ#"
    ")#5#)#5b%a9&%$5$aJ#*#%a)a-$5$9#%#)#%eS5#9,5#*#)#c8$h^#9#a)&9#5#':%b|Yd$#%)cRfk'b_#J#FakHa)`aJq@%$nB*Va8"
    "%.5j{*5$Ubr7l%%eZi%a)&a9#aY#aZ%aJBVb@Fab`n='m)+%1%9a)$cRvLaJ$d5%aJ$5$a)aL%bLaJf2%a$Vh@Vd15d&%%%*5(%gZaJ"
    "aUaJ|M+K]aLc'2;2+1;IbDaX;/;1+%bD6nT>cX-+7+%b3$],f#)at#%}P%;$L%v#%L$]#a)#bgH$pL.a@$f3*;%b#/+%]%+';0;%++;"
    ",+(L/L+L%+$+'+)+&+)vTTrD(b#%d;&+$a@%c7cJj#/]]b#-a@Lb#B;/]%cH,j3/l;$bD$as/a@b#1ahTd3ib;np{1h4#y9#acY#bcR"
    "#aa}Q";
enum {
    TT__LOWER_RUNS = 182, TT__LOWER_LOOK_BACK = 3, TT__COMPAT_ROWS = 3678,
    TT__COMPAT_POINTS = 5599
};
static const char tt__lower_text[] =
    "a(c8a'b*b^#;U#Lf0a$VI#*a^#4e^#R#d&$Id'+#f_$8f^'#fV$#fU%,fT%#fS&#bH$-d)%#fM%#fT$#'%#+$#&$#f['#g#$#'%#%$I"
    "g()#g1$#g0%#g1&#g0%#g1$#g0%,g/%8g.'#g3$#g2'##++%&+#&+#&a^$4b0#6+%&#$%#c2$#a9$e,aZL#d8%b0d9;#k}T$#k}S%#e"
    ">$#le-&#k}M%#fC$#hT$#'$a,b6d_8#)##,#cV*7bG&,$&7Z&#$%b,a$5a(#P#S,c$0@#b$&#b%%#2$#3&4d8&b$g#3d,aGa7d8a$Ng"
    "$#Z#@$aM>2lI#aId^aFarSd^g~DK##)##l&jEaec7a7Mame.afM#0*eIcj4Q4#e:sUcj5bJ#hmW%lIhmXaP^43M#3^#3^#3M#4Y#2^#"
    "D^#3^#3^#3,#%,b.%#b-/<bE'#bF/,%%,c&1,c'%,c>%#cB/,d$%,'%#cZd_#hj2'#|W$#d%*#if7Rb$:G#AmKc8Vaa)f4PaH#aE%#k"
    "|*$#gt_$#gt<&Ik{H)#k}8$#a%$-a*&#k}@&##,,k~C%m,k~DaS8#*##qgFe^#a'cE#bNaM#3h(#a.8#'#aigQ$a,aigR0##%#ap}8&"
    "8ap}9)bA#7#ap~4$#8$#+$#7$#(%#aL$#S$#N$#aq}J$a^~Y3#aI$#ap|I$#gtR$8aiiB'#aqa>$a^aqa@3#aqhO<#aqhPlk]c8a%tS"
    "e03b]dM#c/dY$$a,#/aM#3I#+##}CfMVc@bUa&ar3d,#le7d,#aHc0,ql+d<1";
static const char *const tt__compat_text[] = {
    "aqNd2b*2xT5b)a0b6xLHB##$KxF#~RI~YyV#D#b%7b*icNicG%$icNicK%%icJicGadCc*%$a%%c6a8cF$a%bBb<s=sKoZu4t=cWPw#"
    "%$aTu]%a%Pu]$U&$$a#$a%&$a$*$$]$a%*jUbIP$$aT$a%Paz;f,#p_#p^#1#q3#%#-#q<#%i6d$xP$$xR$$xX$$yX$$xJ$$xZHs/#p"
    "S#/#+#r#anOy^zVbO6xF%$xT0v/{_#-#K$$e>$$e0#a'#0gBa&#/##5a>#]ZOc}*aP_bk*a>bF$a'a@$d/bQ$d.a;sw<b;Yah*#Yl$b"
    "AG$$6mTaJaaVb#b,B7$b.BcyTb`aaeNheM#d;#d<5####j]#j[##############5$#oD#oE#%#%###%#5#p@###gqP#hd4#%###pJ#"
    "%###pO5'#%#g9#g8#p+#gr5###hdC#)###hdB#gqM#pW#hdP#gg.#####F###|Q#3#'###{F###=#+##cZc@j/qC#pC#pF#k[#l)#pQ"
    "#pT#%#)#'#####gt]#gs4#aI#gu-#gsE#aE#&#%#######'#5###g0#g9###gpN#gpO###qM#qR#####iRbe<aeSt-$Fv#bzOl<y-6&"
    "y-$$zP%$xTa]c7:y-I%$y-G%$y-aFc]>y/K%$y/I%$y/aDc]>xT2%$xT0d0AxF$$y/5&#$#$#$#$#$#$#$#$#$#$aTib5aCibOz1cH%"
    "$$#%$##b;Q[icD#%$##6%#%$##a0icY#6(xNb<P#$$`$a$a#c^ic-###b)ic[dT$#aXHaW###########A#is3#irO#O###b3#b(###"
    "################A#is3#irO#O##5aT#)#5#3#p##pG#'#######%#'##c6aCa)z+b<aKaP%$aKb3#a$$cHcI7bIaOb+%$aOb7#j#6"
    "gCcC#b>#a&#$#$#a%#f7#g<#$#'#a%5a&$$a)H$#####$#$I&.%#A1$$05+Z*Z[##5a'#a(##5-#a)#aoX#######ap07a0,R#}J#>#"
    "a(#;#hsPa/irG#a%###)##aVb*icNicA%$icNic<&$icNicM$%$icNicI%#icLicI%&icNicE%#icLicE%#icJicE%#icHicE%*icNi"
    "cC%)icFicC%,icNic>%%icJic>%%icFic>%%icBic>$0icN#R$$#%$##$$=#;$$<%$<#&$<##$>B#@$$A%$A##<#6###3#Z$$#%$##$"
    "$=#;$$<%$<#&$<##$>B#@$$A%$A##<#6###3bPb8icPicIarIinD#%$##6%#%$##eqNjhM################$4$$$#$$%$$'$$)$$"
    "+$$-$$/$$1$$3$#&%852%$74%$96%$;8%$=:%$@<%$B>%$DA%$FC&$5$0&$5#2&$5%4&$5'6&$5)8&$5+:&$5-<&$5/>&$51A&$53C&"
    "$7&0$3($#*$#,$#.$#0$#2$#4$#6$#8%4$&%$#(%$%*%$',%$).%$+0%$-2%$/4%$16%$38%#&&%8aZaW%$a]aY%$a_a[%$b#a^%$b%"
    "a`%$b'b$%$b)b&%$b+b(%$b-b*%$b/b,%$b1b.%$b3b0%$b5b2%$b7b4%$b9b6%$b;b8%$b=b:%$b@b<%$bBb>%$bDbA%$bFbC%$bHb"
    "E%$bJbG%$bLbI%$bNbK%$bPbM#T###################################################/########################"
    "###########################bAmc^hf-###~]iw(#)$'#%$##ee)oQ#Mbl5lp5b~ZqlDxZns;cHwf[#a5#=#3#V#a=#/#J#V#u@#"
    "a1#-#P#J#L#aP#L#7#e+#c)#Z#+#_#3#X#;#T#aN#F#X#y-#b9#o5#P#1#7#F#bB#oX#aF#c_#P#H#N#aR#'#l%#5#9#;#cV#1#+#cX"
    "#5#;#1#b##D#F#bJ#s7#aB#L#xJ#+#bP#B#;#L#a3#+#hX#R#a%#acV#b-#P#aZ#R#3#/#aN#+#a%#ae]#nX#9#+#)#1#F#%#bL#g-#"
    "+#k3#5#aJ#/#3#1#c##/#gF#/#aH#D#aD#gX#/#D#jX#d-#-#f%#bX#aB#lF#d;#s)#X#aX#aL#b1#7#-#a'#bB#5#kB#/#3#3#B#@#"
    ")#bH#)#-#abL#_#oH#9#P#i;#;#b7#aB#rX#@#@#a+#a/#fH#9#b/#h1#a##f]#L#+#g5#f)#d+#-#+#aa)#3#e-#e)#'#aD#c@#;#)"
    "#/#c1#a)#-#=#eD#aL#)#f'#'#H#h9#aF#/#b5#5#'#5#_#m+#m5#5#a1#N#1#5#)#a5#)#D#+#;#X#@#1#a]#@#)lHaolAoZmq75i~"
    "-#'##|UwvOmwJ$$mwLImv_'|CaQNnNib,###eH#eI#eJ###eM#####eL###########e.#M#####T#U###################bH###"
    "######################################O#bE###eZ###)#%#+#)#%#f6#f;#%#fA###%#%###)#%#%#########'#)#5#/#+#"
    "e@###e.#####a;###'#3###%#5#'Zqe%#dJ#d:#bo1#bo2#a+#a,#kd'#kaC#b,#U#ce-#pW#bl0|VvmMdwPdwM%$dwTdwQ%$dwVdwS"
    "%$dwZdwW%$dw]dwY%$dw_dw[%$dx%dw`%$dx)dx&%$dx+dx(%$dx/dx,%$dx1dx.%$dx3dx0%$dx5dx2%$dx7dx4&$dwPc1dz[&$dwT"
    "c-dz[&$dwVc+dz[&$dwZc'dz[&$dw]c%dz[&$dw_c#dz[&$dx%b]dz[&$dx)bXdz[&$dx+bVdz[&$dx/bRdz[&$dx1bPdz[&$dx3bNd"
    "z[&$dx5bLdz[&$dx7bJdz[&$dx+c3d{8)$dx)c+c(b_b7d}:($dx)c+bYc'd{87&vd3vd0%$vh]vhY%$vdFvdC%$xsVxsS%$vi/vi,%"
    "$wcBwc>%$vd9vd6%$wc=wc:%$vg9vg6%$ws)ws&%$}gX}gU%$aa{_aa{[%$~v#~u^%$}h]}hY%$akl_akl[%$xv)xv&%$||-||*%$}q"
    "D}qA%$}gZ}gW%$adm3adm0%$wyZwyW%$aboBabo>%$ai|Nai|K%$adn5adn2%$wn;wn8%$vkVvkS%$w}Hw}E%$y|Hy|E%$acw-acw*%"
    "$vlVvlS%$ai}_ai}[%$wsPwsM%$adnVadnS%$vm9vm6%$af{3af{0%$af{Faf{C#xfH#br3#a~'#fg_b=aea`+A$a$$$$#$$%$$'$$)"
    "$$+$$-$$/$$1$#($$&$$$$$#$$%$$'#dw7#%###%#####%#%###%########$Ic1$%c-$#c+$%c'$#c%$#c#$%b]$%bX$#bV$%bR$#b"
    "P$#bN$#bL$#bJ',bRbXf(cB&(c3c4cB$&c55qj)#dJ#d:#bo1#bjK#x3#},#}%#z(#akN#erP#bt'#ae`#am(#ld##ptY#df%#s7#iK"
    "#ee7#jq:#hsF#gm-#en<#j}[#kc_#aiC#gz^#or_#q}O#s9#gg5#lgX#tvE#uF#gj%#hj>#a+#a,#do3#bx[#f,#bk5#aK#gxD#kj8#"
    "qq)#pj2#as5$yhO)$$+$$-$$/$#*$$($$&$$$$$#$$%$$'$$)$$+$$-$#,$,}gF$#}gD$#}gB$#}g@$#}g=$#}g;$#}g9$#}g7$#}g5"
    "%4$}gH%$#}gF%$%}gD$Pa%%]=8$$A%W3C#mv=#%#%#%#%###%#%#%#%#%#%#%#%#%#%#%#'#%#%#%###########'#'#'#'#'######"
    "###%#%#%###########%######9bOaBaQc3aO&$b=OaO'$bNYb&3%$c#E'%a5a7b2O%$bJaK%%)b@(%F6bFaOaE&$bTbMbN%%b=a[%$"
    "bP[%#0b7&$b'a2-&$b/(H&$GbT/&$Gc#M&%KHG&$KaLaJ&$aX-H($KbPa>a2c5$$b+($b+b&ObL4($b+:ZaOa-'$b+'a>-&%ObL4($O"
    "bL4Sa=($b#aGa*9b=&$b'BaE%%bBb0%%aXa(&$b=a(b,&%E9b#'$b'aKa_['%aN5b2O%)aXaK%$aX",
    "a<&)a2c5b0%/aAa#%%aEbP$$a=$%+%)8-%#a<a'($aQc3b,aXa<&$aQc3aW'$aSc5C$('aW3RBa-&$aWNb#%$aWV%$aYbP('aOb;a2-"
    "aE&$aKb_aO($a`a;:Cb3%$L7''a8Db%E%$b&a-&$b&aJ1%$Ja4&$b&b_a['$b&c3b4`&$b(c5b$''b,7bJa<&$b.bPa,$$T'$b,b_a<"
    "aE%$a)E%$a)4&'a[9b'%$a[b9%$Y;%$=a`'$Na`aH;&#aGb'/$$9($9YaSc5E%%aSG'$aSGaFa=&$ZaOa-&'TaOaE%$TE%%b2bN&)a4"
    "-a-$$$&#UaWc3'$Fa4a`bP$#:($1a<QSc#%'a>-$my`aa~5$#aa~3$#aa~1$#aa~/$#aa~-$#aa~+$#aa~)$#aa~'$#aa~%$#aa~#%4"
    "$aa~5%$#aa~3%$%aa~1%$'aa~/%$)aa~-%$+aa~+%$-aa~)%$/aa~'%$1aa~%%$3aa~#%#&aa~5%$$aa~3%$#aa~1%$%aa~/%$'aa~-"
    "%aRSF$,($a.L%a'$F$;U$#<$<5%$5a^%$5a[$[;$zwB~V$beZd~<$cu,eeH$ct'az_&q_bqMdp,k}H$}o,aE$(aA$|-}M$|2a>$(a:$"
    "a(4$%8$0,%Z&9&12&9$+a:$(a6$|-}C$$|<$|2.$(*$a.aL%a+a,aL%a$,aL%0%aL%;:aL$}%|2$|2$$63$/%$.1$1$$|-|0$|2#$87"
    "$1'%%#a^%87a^$5a^%('a^%%#a[%87a[$5a[%('a[%%iq/ip`&$iq/ip`b,$`F%XYF%a$)F%05F%a;E)'$E)iqBip`($E)iqBip`b,$"
    "()$(-$|-|$$|2/$'W$(S$|-|`$|2Q$(M$a$5$a+U$(Q$|-|^$|2O$(K$a$7$_{L$a$|L&JaMb)b($a&aF$a'#$$%&a(irHiq2*%$a@b"
    ",$a'a*$`aL$a'0$a(3$a'-$a$#$$'$a%5$#%$$'%$)2$$;$#8%$*)%$'($`2&a%b.b)b(%a(#($$'$a+$$a(a-$)9%&iq_iq.%OirLi"
    "q.$E|{X$#|{V$#|{T$#|{R$#|{P$#|{N$#|{L$#|{J$#|{H%4$|{Z%$#|{X%$%|{V%$'|{T%$)|{R%$+|{P%$-|{N%$/|{L%$1|{J%$"
    "3|{H%#&|{Z%$$|{X%$#|{V%$%|{T%$'|{R%$)|{P%$+|{N%$-|{L%$/|{J%$1|{H%#(|{Z%$&|{X%aN.9iwl#aanW#%bc#ape'ajBaq"
    "mA#a@hsTapf-#adJ#aq~<#ara3fwy0bkh$#$$)$$/%$#)%$#/$;%$$%cIal3'$$A$$4$52$80b;c9#I#'###/#####7#%#as&k*apZ;"
    "#e7#$#5#$#$#$#'#$#$#$#%#$#$#$#0#$#$#$#+#$#$#$#0#$#$#$#a;#$#$#$#%#$#$#$#a,#$#$#$#&#$#$#$#'#$#$#$###$#$#$"
    "#-#$#&#$#%#$#0#$#B#$#2#$#R#$#$#$#-#$#$#$#)#$#$#$#(#$#$#$#3#$###$#$#$$Vd4$$d4#M#$#$#$#*#$#$#$#J#$$$d.$$d"
    ".iZb8#$#$#$#V#$#&#$#%#$$&bQ#)#$#0#$#)#$#/#$#$#$#dC#$%#7aA%$7aA%$7d5%$7d5%$7:%$7:%$7cV%$7cV%$7cT%$7cT%$7"
    "cX%$7cX%$7d+%$7d+%$7d+%$78%$78%$78#d5#$#$#$%d87a6%$7a4%$7A%$78%$76$a,+$$-$$/$$_$$a)$$a+$%'$$)$$+$$Z$$a%"
    "$$a'$#%$$X$$a#$$a%$#%$$V$#$$$T$#&$$$$$R$+0$$.$$,$$H$%2$$D$#6$$4$$2$$B$#6$$@$#=$#<$$;$#>$$9$/M$$K$$I$$+$"
    "$3$$5$#M$$)$$1$$3$#[$$Q$$O$$M$$%$$'$$/$$1$#S$$Q$$O$$%$$-$$/$#U$$S$$Q$$#$$+$$-$#W$$U$$S$$$$$)$$+$#Y$$&$$"
    "'$$)$'`$$^$$[$$,$$$$$#$Yb+$#b)$Ra5%avGavL-%$avN+%$avP)%$avR'%$avT%%$avVa%%avF7a,%$7a*%$7A%$7>%$78%$76$a"
    ",5$$7$$_$$a#$$a)$$a+$%1$$3$$Z$$]$$a%$$a'$#/$$1$$X$$Z$$a#$$a%$N3$$5$#1$$3$#[$$%$$'$$/$$1$#%$$-$$/$#`$$#$"
    "#M$$K$$$$$#$$)$$+$'a5$#U$$S$$,$$*$$$$$#%$7a6%$7a4%$7a2%$7A%$7<$a,+$$-$$/$$_$$a%$%'$$)$$+$$Z$$_$#X$#%$$V"
    "$#$$$T$#&$$R$+0$$.$$,$$H$%2$$0$$D$#6$$4$$2$$B$#6$#=$#<$$;$#>$$9$/M$$K$$I$$+$#M$$)$#Q$$O$$M$$%$$'$#S$$Q$"
    "$O$$%$$)$#U$$S$$Q$$#$#W$$U$$S$$$$$%$#Y$$&$$a9$'`$$^$$[$$,$$(%$7A%$7<$a,_$$a%$%Z$$_$#X$$]$1H$$L$#F$$J$@%"
    "$$'$#%$%$$$%$),$$(%8@)%$B'%$D%$6H$$J$%D$$F$#B$$D$2P$$R$#N$$P$2]$$_$&_$$a#$%Z$$]$/L$$N$#J$$L$(2$$0$$.$$F"
    "$$($&&$%*$#,$#H$$J$%D$$F$#B$$D$2P$$R$#N$$P$2]$$_$&_$$a#$%Z$$]$/L$$N$#J$$L$(2$$0$$.$$F$$($&&$%*$#,$(2$$0"
    "$$.$$F$&L$#J$'@$,0$$.$$,$#2$$0$$.$'@$#=$Ga/$$a/e=C'V%$)$%$)$%$)T%$+R%$ZU%$ZS%$ZQ%%VS%$VS%#T-%$T+%-.$%$0"
    "%%$0_%$HS%$HS%$HU%$H#%$H#%%2#%$2#%$D#%&0T%$0T%$2a#%$FQ%$FQ%$F#%$F#%%4]%$2R%$2R%#@S%$@S%$@#%$@-%%<V%$;#%"
    "$;#%$;+%#9#%$9-%$9+%/IR%$IR%#)S%$)#%%QT%$Q_%$Q]%$S#%$S#%$OR%$OR%$%S%$%S%#S$%$ST%$S_%$U%%$UV%$Q&%$QRJ(U'"
    "%%&U%$&#%&UT%$U]%$WV%$WV%$W_%$$-%$$+%),#%$,#%a,/]%%'a#%$'_%$+]%$+Z%$Z-%$Z+%%V-%$%]%$V+%/,Z%%2_%&0_%%4_%"
    "=Sa#%$%-%-^_%$`a#%$,-%.#-%*)-%)U_%,)S%%QT%:;-%5'-%'W%%&Q]%&SV%&'#%#SV%%W%%Y%_%#$a#%RUa#%,+-%W-_%X'#%8<V"
    "%,D#%(,]%HWa#l%a[BdP%;'dP&[_#)&$]Y5&_STO&EB8;&,'N*&19/(&@MF%%KB-4$B-avEau=_#)avAav%9/(avAavDMF%*6Tav:au"
    "HT^_)&+e-eA_eNav$#mr+###mqQ###Y#_#mr/##%mrW##fIQ##ib-#&#h~E#$#aW###bN#%#mp'###.###2###*###'######Hmq,#%"
    "$b&xN$$xN$$xN$$xN#b'#$#$#aO#mr+#mr*59#&#+#a$#ibH#ib<###bN#%#mp'###ms,#'#)###%#@#%#&5_#aY###Xa0a0avJ$av1"
    "9$av4avL6&avN6&avP$av1@$av4avR$av1B$av4avT$av1D$av4avV$av1F$av4avX$av1H#a&$-a@$$a@$$aB$$aB$a';$$;$a*aD$"
    "$aD$a+7$$7$$7$$7#a.#$###$#$#$###$###$#$#$###$#$#$###$#$#$###$#$#$###$#$#$###$###$###$###$###$#$#$###$#$"
    "#$###$#$#$###$#$#$###$#$#$###$#$#$###$#$#$###$#$#$#/#$#$#$###$#$#$###$#$#$###$#$#$###$#$#$###$#$#$###$#"
    "$#$###$###$###$#$#$%0^a@%$^a@%$^aB%$^aB%$^aD%$^aD$$^$$^a/avC###########################################"
    "#######################################################################################################"
    "#########################################kt'###ay5#5###<#h5#6#bO#%#%#%#%#aZ#%#",
    "%#a0#aX#c$#%#%#%#%###%#%#%#%#%#%#%#%#%#%#%#'#%#%#%###########'#'#'#'#'#########%#%#%###########%#)#c$##"
    "#hzA#c0###eH#eI#eJ###eM#####eL###########e.#M#####T#U##################ZbB##########H&##########H&#####"
    "#####H&####ZdwM###3$dMxL#d=#&#ic-5ag%#}<#######adD#a;rbzNbj}`##########################################"
    "#########/###################################################a[########################################"
    "###########/############5####################################a[########################################"
    "###########/###################################################a[5###H#H###H#######5################/##"
    "####5#5#############5######################a[###################################################/######"
    "#############################################a[##5#######H###############5#############5/##############"
    "#####################################a[##5#######5#########5#Z#############5/##########################"
    "#########################a[###################################################/########################"
    "###########################a[###################################################/######################"
    "#############################a[###################################################/####################"
    "###############################a[###################################################/##################"
    "#################################a[###################################################/################"
    "###################################a[###################################################/##############"
    "#####################################f'#hNHk=#################################6#7#############hs)#hrY##"
    "###############################################hqX#hrG#'#%#9#.#&#aG#################################6#7"
    "#############hs)#hrY#################################################hqX#hrG#'#%#9#.#&#aG##############"
    "###################6#7#############hs)#hrY#################################################hqX#hrG#'#%#"
    "9#.#&#aG#################################6#7#############hs)#hrY#######################################"
    "##########hqX#hrG#'#%#9#.#&#aG#################################6#7#############hs)#hrY#################"
    "################################hqX#hrG#'#%#9#.#&#Z##Haa>###################6###################6######"
    "#############6###################6##################aziHdq,###)#'5R#Q#.#5#H#2#######K#-#1#<#;#G#'#8###'"
    "#%#-#%#%#aN#bB#W#aM5b<#)5VH^5Z#2#######K#-#1#<#;5C#8###'5/5'aTMa/*5Z525##K#-5.#;5CH45/5'5d/5bE5b<#)5VH^"
    "#5#H#25####K#-#1#<#;5C#8###'5/#%#%#aN5aJ5d*###)#'#R###Q#.#5#H52#####K#-#1#<#;#G#'#8###'#%#-#%#%aBS#)#'5"
    "R#Q#.#5#H52#####K#-#1#<#;#G#'#8###'#%#-#%#%ex$bjY&$$*$#,$#.$#0$#2$#4$#6$#8$#:$#<aDQVS%$XU%$ZW%$]Y%$_[%$"
    "a#^%$a%`%$a'a$%$a)a&%$a+a(%$a-a*%$a/a,%$a1a.%$a3a0%$a5a2%$a7a4%$a9a6%$a;a8%$a=a:%$a@a<%$aBa>%$aDaA%$aFa"
    "C%$aHaE%$aJaG%$aLaI%mrZmqAmqD#mr&#@$C%$J)5S##################################################$I@$+5$-A$"
    "$#%*#/$/KgUa06$$4jUaC/ac6mqNaG$aV##%cZnbL#a}8#bd:$i|YaA#hn%#b~%#mz3#myU#b}S#ft9#ccX#ch<#enM#cw##c}>#euT"
    "#eq&#lh+#bi>#ftV#nu:#aj2#gs+#cpK#f9#fb&#3#ry7#nj$#dn.#as1#dhJ#laX#lg[#fqR#h3#j|(#goV#bcO#&#c~X#izG#{V#p"
    "|@a1{sSot+ot(%$hoJhoG%$ht#hs^%$ljVljS%$rkJrkG%$nhRnhO%$tcVtcS%$izVizS%$odBod>b)mo-#ciA"};

/* Bits of a code point: the classes of characters that the regular expressions and splitters of the package
   `tokenizers` distinguish. */
enum {
    TT__IS_LETTER = 1, TT__IS_NUMBER = 2, TT__IS_SPACE = 4, TT__IS_PUNCTUATION = 8, TT__IS_WORD = 16,
    TT__IS_DIGIT = 32, TT__IS_UNSTABLE = 64, /* NFC may change the character or its predecessor */
    TT__IS_ACCENT = 128                      /* the character is a combining mark */
};

/* Whether BERT's normalizer drops a code point always, or only if it strips accents. */
enum { TT__BERT_DROP = 1 /* drops controls, private use and U+FFFD */, TT__BERT_ACCENT };

/* Classes of code points that decide where graphemes end (Unicode Standard, annex 29). Unlike in the
   Standard, a pair of regional indicators is two graphemes, which makes no difference to the callers. */
enum {
    TT__GRAPHEME_OTHER, TT__GRAPHEME_CONTROL, TT__GRAPHEME_EXTEND,
    TT__GRAPHEME_EXTEND_ALONE, /* an extender that separates two consonants */
    TT__GRAPHEME_LINKER, TT__GRAPHEME_JOINER, TT__GRAPHEME_SPACING, TT__GRAPHEME_PREPEND,
    TT__GRAPHEME_PICTURE, TT__GRAPHEME_CONSONANT,
    TT__GRAPHEME_L, TT__GRAPHEME_V, TT__GRAPHEME_T, TT__GRAPHEME_LV, TT__GRAPHEME_LVT /* Hangul */
};

/* The unpacked tables. An expression `c << 11 | x` stands for a number with a code point c in the upper
   21 bits and a small number x in the lower 11 bits. */
typedef struct tt__unicode {
    uint8_t bits[0x110000];               /* TT__IS_... */
    uint8_t bert[0x110000];               /* TT__BERT_..., or 0 */
    uint32_t marks[TT__MARK_ROWS][2];     /* runs of combining marks. [0]:
                                             `first << 11 | (last - first)`; [1]: rank of their
                                             combining class */
    uint32_t pairs[TT__PAIR_ROWS][3];         /* decompositions of code points c. [0]: `c << 11 | x`, where x
                                             is 1 if NFC composes c, else 0; [1], [2]: the first and the
                                             second code point of the decomposition, or 0 */
    uint32_t by_pair[TT__COMPOSED_PAIRS]; /* indices of the rows of `pairs` that NFC composes, sorted by the
                                             two code points */
    uint32_t cjk[TT__CJK_POINTS];         /* decompositions of U+F900..U+FAFF and U+2F800..U+2FA1F */
    uint32_t graphemes[TT__GRAPHEME_ROWS][2]; /* runs of code points of one class. [0]: `first << 11`; [1]:
                                                 `last << 4 | TT__GRAPHEME_...` */
    uint32_t lower[TT__LOWER_RUNS][2];        /* runs of capitals. [0]:
                                                 `first << 11 | (last - first) << 3 | x` with 8 bits
                                                 for last - first and x = `(stride - 1) * 3 + step`;
                                                 [1]: lower case of `first` */
    uint32_t compat[TT__COMPAT_ROWS][2];      /* compatibility decompositions of code points c. [0]:
                                                 `c << 11`; [1]: `at << 5 | n` for the n code points
                                                 from compat_points[at] on */
    uint32_t compat_points[TT__COMPAT_POINTS];
} tt__unicode;
